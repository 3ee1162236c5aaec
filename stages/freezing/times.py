"""Predicts the time of a step of which a part is frozen."""

from __future__ import annotations

import random
from collections.abc import Iterator
from math import comb, fsum

from stowage.stages.freezing.projection import Guarded
from stowage.stages.ir.actions import STARTS
from stowage.stages.ir.units import ALWAYS, bit
from stowage.stages.simulate.lower_tier import ReplayedTier

DRAWN = 16
"""Masks over which the time of a plan that copies is averaged."""


def chance(guard: int, units: int, active: int) -> float:
    """Return the probability that something of a guard trains, where each choice of so many units is equally likely."""
    if guard & ALWAYS:
        return 1.0
    return 1.0 - comb(units - guard.bit_count(), active) / comb(units, active)


def mean_times(plan: Guarded, active: int) -> tuple[float, float]:
    """Return the mean time of computing, and the least that it takes if nothing is computed again.

    Collectives can run beside computing, so the longer of the two counts for the latter.
    """
    count = len(plan.units)
    known: dict[int, float] = {}
    computing: list[float] = []
    first: list[float] = []
    together: list[float] = []
    seen: set[int] = set()
    for step, guard in zip(plan.steps, plan.guards.rows, strict=True):
        if step.kind != "compute" and step.kind not in STARTS:
            continue
        if guard not in known:
            known[guard] = chance(guard, count, active)
        node = plan.nodes[step.node]
        mean_s = known[guard] * node.time_s
        if step.kind == "compute":
            computing.append(mean_s)
        if step.node not in seen:
            (together if node.collective else first).append(mean_s)
        seen.add(step.node)
    return fsum(computing), max(fsum(first), fsum(together))


def mean_with_copies(plan: Guarded, active: int, tier: ReplayedTier) -> float:
    """Return the time of a plan, averaged by the referee's clock over masks that are drawn.

    It is needed where a plan copies or exchanges beside computing.
    """
    times = [plan.under(mask).replay(tier=tier).time_s for mask in drawn_masks(len(plan.units), active)]
    return fsum(times) / len(times)


def drawn_masks(count: int, active: int) -> Iterator[int]:
    """Yield masks of so many units of `count`, the same in every run."""
    draws = random.Random(0)
    for _ in range(DRAWN):
        yield ALWAYS | sum(bit(u) for u in draws.sample(range(count), min(active, count)))
