"""Chooses which classes of tensors to keep in which kind of codes, within a limit on the error of the gradient.

Of each class c at most one kind k is taken, so that

    maximise    Σ price · bytes(c, k) − seconds(c, k)
    subject to  Σ error²(c, k) ≤ limit²

with a price of a byte in seconds. Several prices give several choices, from the few that spare most bytes a second to
all that the limit admits; the solver of the chain picks among them, block by block.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from stowage.stages.ir.costs import Cost
from stowage.stages.ir.lossy import GradientError, Lossy
from stowage.stages.ir.trace import TraceTables
from stowage.stages.ir.variant import VariantName
from stowage.stages.rewrite.lossy.classes import Classes
from stowage.stages.rewrite.lossy.codecs import CODECS, allowed
from stowage.stages.rewrite.masks import mask_draws

STEPS = 1000
"""Steps into which the limit is divided; errors are rounded up to whole steps."""

MOST_CHOICES = 3
"""Most choices that are planned with."""

MASKS = "packed"
"""The rewrite of dropout masks: it costs next to nothing and no error, so it is made along with the others."""


@dataclass(frozen=True)
class Candidate:
    """One class of tensors in one kind of codes.

    Attributes:
        rewrite: the rewrite's name; that of the kind.
        tensors: the class.
        sites: the rewrite's sites.
        squared_error: see `GradientError`.
        bytes: bytes that wait less between forward and backward, in one step, be it on the mean of steps.
        spared: the storages that wait no more.
        seconds: what packing, unpacking and computing again take, in one step.
    """

    rewrite: str
    tensors: str
    sites: tuple[int, ...]
    squared_error: float
    bytes: int
    seconds: float
    spared: frozenset[int] = frozenset()


def choices(
    trace: TraceTables,
    costs: Mapping[str, Cost],
    errors: Sequence[GradientError],
    lossy: Lossy,
    frozen: float | None = None,
) -> list[str]:
    """Return names of variants in which some classes are packed, from the one that spares most bytes to the least.

    Where something may be frozen, those that are of use in any step come first, then those with codes for what is
    frozen.

    Args:
        trace: the step as it was recorded.
        costs: the cost of every call of it and of `Classes.everywhere`.
        errors: what was measured.
        lossy: the leave.
        frozen: the share of units that is frozen in a step; None where nothing ever is.
    """
    found = candidates(trace, costs, errors, lossy, frozen)
    always = [c for c in found if not CODECS[c.rewrite].for_freezing]
    names = dict.fromkeys(_named(trace, always, lossy))
    if len(always) < len(found):
        names |= dict.fromkeys(_named(trace, found, lossy))
    return list(names)


def _named(trace: TraceTables, found: Sequence[Candidate], lossy: Lossy) -> list[str]:
    if not found:
        return []
    masks = tuple(range(len(mask_draws(trace))))
    ratios = sorted(c.seconds / c.bytes for c in found)
    prices = [math.inf, *(ratios[len(ratios) * i // MOST_CHOICES] for i in range(MOST_CHOICES - 1, 0, -1))]
    names: dict[str, None] = {}
    for price in prices:
        taken = chosen(found, price, lossy.max_gradient_error**2)
        if taken:
            names[_name(taken, masks)] = None
    return list(names)


def _name(taken: Iterable[Candidate], masks: Sequence[int]) -> str:
    sites: dict[str, list[int]] = {MASKS: list(masks), **{name: [] for name in CODECS}}
    for candidate in taken:
        sites[candidate.rewrite] += candidate.sites
    return VariantName.at(sites).text


def candidates(
    trace: TraceTables,
    costs: Mapping[str, Cost],
    errors: Sequence[GradientError],
    lossy: Lossy,
    frozen: float | None = None,
) -> list[Candidate]:
    """Return what may be chosen: within the limit by itself, and sparing bytes.

    What is spared only while something is frozen counts by the share of units that is.
    """
    classes = Classes(trace)
    members = classes.members(allowed(lossy.kinds, freezes=frozen is not None))
    before = _Totals.of(trace, costs)
    rows = {(e.kind, e.tensors): e.squared_error for e in errors}
    found = []
    for kind, name in members:
        exact = CODECS[kind].exact
        error = 0.0 if exact else rows.get((kind, name), math.inf)
        # With a limit of 0 a batch on which codes happen to change nothing is not enough.
        if exact or (error <= lossy.max_gradient_error**2 and lossy.max_gradient_error > 0):
            after = _Totals.of(classes.frozen(kind, name)[0], costs)
            share = frozen or 0.0 if CODECS[kind].for_freezing else 1.0
            found.append(
                Candidate(
                    kind,
                    name,
                    tuple(site for site, _ in members[kind, name]),
                    error,
                    int(share * (before.waiting_bytes - after.waiting_bytes)),
                    max(after.seconds - before.seconds, 0.0),
                    frozenset().union(*(saved.freed for _, saved in members[kind, name])),
                )
            )
    return [c for c in found if c.bytes > 0]


@dataclass(frozen=True)
class _Totals:
    """What waits between forward and backward, and how long all calls take."""

    waiting_bytes: int
    seconds: float

    @staticmethod
    def of(trace: TraceTables, costs: Mapping[str, Cost]) -> _Totals:
        made: set[int] = set()
        waiting: set[int] = set()
        for call in trace.calls:
            if call.is_view:
                continue
            if call.phase == "forward":
                made.update(trace.values[v].storage for v in call.returns if v >= 0)
            else:
                waiting.update(made.intersection(trace.values[v].storage for v in call.reads))
        nbytes = sum(trace.storages[s].nbytes for s in waiting if trace.storages[s].role == "temporary")
        return _Totals(nbytes, sum(costs[c.signature].time_s for c in trace.calls if c.signature in costs))


def chosen(found: Sequence[Candidate], price: float, limit: float) -> list[Candidate]:
    """Return the best choice for one price of a byte, by dynamic programming over the classes.

    Args:
        found: what may be chosen.
        price: seconds that a byte is worth; with infinity bytes alone count, and seconds where they are equal.
        limit: most of the sum of squared errors; with 0, what has none is chosen from.
    """
    groups: list[tuple[set[int], list[tuple[Candidate, int]]]] = []
    for candidate in found:
        steps = math.ceil(STEPS * candidate.squared_error / limit) if candidate.squared_error else 0
        if steps > STEPS:
            continue
        spared, own = set(candidate.spared), [(candidate, steps)]
        for group in [g for g in groups if not spared.isdisjoint(g[0])]:  # of what spares the same, one is taken
            groups.remove(group)
            spared |= group[0]
            own = group[1] + own
        groups.append((spared, own))

    def worth(candidate: Candidate) -> tuple[float, float]:
        if math.isinf(price):
            return candidate.bytes, -candidate.seconds
        return price * candidate.bytes - candidate.seconds, 0.0

    best: list[tuple[float, float]] = [(0.0, 0.0)] * (STEPS + 1)
    taken: list[tuple[Candidate, ...]] = [()] * (STEPS + 1)
    for _, own in groups:
        new_best, new_taken = list(best), list(taken)
        for candidate, steps in own:
            gain = worth(candidate)
            if gain <= (0.0, 0.0):
                continue
            for level in range(steps, STEPS + 1):
                value = best[level - steps][0] + gain[0], best[level - steps][1] + gain[1]
                if value > new_best[level]:
                    new_best[level], new_taken[level] = value, (*taken[level - steps], candidate)
        best, taken = new_best, new_taken
    return list(taken[STEPS])
