"""States how far plans are from the optimum, and takes schedules that cuts have found where they are faster."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from stowage.stages.ir.plan import EACH_WHOLE
from stowage.stages.ir.variant import PLAIN, VariantName
from stowage.stages.rewrite import Way, exchangeable, is_exact
from stowage.stages.solve.cuts.charges import charges_of
from stowage.stages.solve.cuts.found import Schedule
from stowage.stages.solve.cuts.mixed_way import MixedWay
from stowage.stages.solve.cuts.naming import NamedWay
from stowage.stages.solve.cuts.race import improve_all
from stowage.stages.solve.cuts.statement import Bound, with_bound
from stowage.stages.solve.cuts.transfers import TransferWay
from stowage.stages.solve.cuts.union import Union
from stowage.stages.solve.cuts.way import CutWay
from stowage.stages.solve.offload.tier import LowerTier
from stowage.stages.solve.program.of_trace import program_of
from stowage.stages.solve.request import PlanRequest
from stowage.stages.solve.summary import KeepingAll, Solved, solved
from stowage.stages.solve.time_share import CUTS, share_of_planning

PROVEN = 1e-3
"""Relative distance to the bound within which a plan counts as optimal."""

FOR_THE_LAST = 0.16
"""Share of the time that is left for what was begun before it is over, and for judging what was found."""


@dataclass(frozen=True)
class Planned:
    """One way to compute the step, with its plan; None where none fits.

    Attributes:
        way, plan: the way, and its plan.
        mixture: some blocks are computed in one way and some in another.
    """

    way: Way
    plan: Solved | None
    mixture: bool = False


def proven(
    plans: Sequence[Planned], others: Sequence[Way], request: PlanRequest, allowed: Callable[[Way], bool]
) -> list[Solved]:
    """Return plans, some of which are faster now, with the bound of all ways and their mixtures in each.

    Args:
        plans: the ways, each with its plan.
        others: ways that have no plan, because none could be faster than one that there is, or because they are allowed
            in some blocks alone.
        request: what was asked for.
        allowed: says whether a way may be taken.
    """
    known = [p.plan for p in plans if p.plan is not None]
    if not request.cut_seconds or not known:
        return known
    began_s = time.monotonic()
    until_s = began_s + (1 - FOR_THE_LAST) * seconds_of(request, began_s)
    if request.lower_tier is not None:
        found = _bounded_with_transfers(plans, request, request.lower_tier, until_s)
    else:
        found = _bounded(plans, others, request, allowed, until_s)
    took_s = time.monotonic() - began_s
    return [replace(plan, proving_s=took_s) for plan in found]


def _bounded(
    plans: Sequence[Planned],
    others: Sequence[Way],
    request: PlanRequest,
    allowed: Callable[[Way], bool],
    until_s: float,
) -> list[Solved]:
    """Return plans, some of which are faster now, with the bound of all ways and their mixtures in each."""
    known = [p.plan for p in plans if p.plan is not None]
    plans = [*plans, *(Planned(way, None) for way in others)]
    ways = _ways([p for p in plans if p.plan is not None or allowed(p.way)], request.device_budget_bytes)
    mixed_way = _mixed(plans, request, allowed)
    improve_all(mixed_way, ways, until_s)
    least = mixed_way if mixed_way is not None else min(ways, key=lambda w: w.bound_s)
    found = [_faster(p.way, p.plan, ways, request) for p in plans if p.plan is not None]
    if mixed_way is not None and mixed_way.found is not None and request.method == "auto":
        found.append(_replaced(min(known, key=lambda s: s.summary.step_time_s), mixed_way.found, request))
    whole = [] if mixed_way is not None else _mixable(plans)
    return [_stated(plan, least, whole) for plan in found]


def _bounded_with_transfers(
    plans: Sequence[Planned], request: PlanRequest, tier: LowerTier, until_s: float
) -> list[Solved]:
    """Return plans that may offload, with the bound of all ways, and of the best mixture of them, in each."""
    ways = [
        TransferWay(
            p.way,
            program_of(p.way.trace, p.way.nodes),
            _time_s(p),
            request.device_budget_bytes,
            tier,
        )
        for p in _distinct(plans)
    ]
    improve_all(None, ways, until_s)
    least = min(ways, key=lambda w: w.bound_s)
    return [_stated(p.plan, least, _mixable(plans)) for p in plans if p.plan is not None]


def seconds_of(request: PlanRequest, now_s: float) -> float:
    """Return the time that cuts may take.

    Args:
        request: what was asked for.
        now_s: the clock of `time.monotonic`.
    """
    return seconds_for_cuts(request.cut_seconds, request.planning_since_s, now_s)


def seconds_for_cuts(cut_seconds: float, planning_since_s: float | None, now_s: float) -> float:
    """Return the time that cuts may take; the arguments are those of `PlanRequest`, and the clock's."""
    return min(cut_seconds, share_of_planning(CUTS, planning_since_s, now_s))


def _distinct(plans: Sequence[Planned]) -> list[Planned]:
    """Return every rewrite, and the mixture of them whose plan is the fastest if there is one.

    Ways that differ only in where blocks end have the same schedules, and count once.
    """
    fastest = min((p for p in plans if p.plan is not None), key=_time_s)
    best: dict[str, Planned] = {}
    for planned in plans:
        if planned.mixture and planned is not fastest:
            continue
        rewrite = VariantName.of(planned.way.name).rewrite
        if _time_s(planned) < _time_s(best.setdefault(rewrite, planned)):
            best[rewrite] = planned
    return list(best.values())


def _ways(plans: Sequence[Planned], budget_bytes: int) -> list[CutWay]:
    return [
        CutWay(p.way, program_of(p.way.trace, p.way.nodes), p.plan.rows if p.plan else [], budget_bytes, _time_s(p))
        for p in _distinct(plans)
    ]


def _mixed(plans: Sequence[Planned], request: PlanRequest, allowed: Callable[[Way], bool]) -> MixedWay | None:
    """Return the program of all ways together; None where no block can be computed in more than one."""
    pure = [p.way for p in plans if not p.mixture]
    if not _mixable(plans):
        return None
    ways = [NamedWay(way) for way in sorted(pure, key=lambda way: not _plain(way))]
    union = Union.of(ways, charges_of(ways[0].way, pure, request))
    if union is None:
        return None
    fastest = min((p for p in plans if p.plan is not None), key=_time_s)
    rows = fastest.plan.rows if fastest.plan is not None else []
    return MixedWay(union, ways, fastest.way, rows, request.device_budget_bytes, _time_s(fastest), allowed)


def _mixable(plans: Sequence[Planned]) -> list[str]:
    """Return the rewrites that were planned, if some blocks can be computed in one and some in another; else none."""
    pure = [p.way for p in plans if not p.mixture]
    if not any(exchangeable(a, b) for a in pure for b in pure if _plain(a) and a is not b and _chain(a) == _chain(b)):
        return []
    return list(dict.fromkeys(VariantName.of(way.name).rewrite for way in pure))


def _plain(way: Way) -> bool:
    return VariantName.of(way.name).rewrite == PLAIN


def _chain(way: Way) -> str:
    return VariantName.of(way.name).chain


def _time_s(planned: Planned) -> float:
    return planned.plan.summary.step_time_s if planned.plan is not None else math.inf


def _faster(way: Way, plan: Solved, ways: Sequence[CutWay], request: PlanRequest) -> Solved:
    """Return the schedule that cuts have found of a way, as a plan, if it is faster; else the plan."""
    found = next((w.found for w in ways if w.way is way), None) if request.method == "auto" else None
    return _replaced(plan, found, request) if found is not None else plan


def _replaced(plan: Solved, found: Schedule, request: PlanRequest) -> Solved:
    """Return a schedule that cuts have found as a plan, if it is faster than one that is known; else that one."""
    way, judged = found.way, found.judged(request.device_budget_bytes, request.cut_seconds)
    if judged.time_s >= plan.summary.step_time_s:
        return plan
    s = plan.summary
    keeping_all = KeepingAll(s.keep_all_peak_bytes, s.keep_all_time_s)
    smallest = min(s.smallest_feasible_bytes, judged.peak_bytes)
    faster = solved(way.trace, way.nodes, judged, keeping_all, smallest, request, s.lower_bound_s)
    return replace(faster, summary=replace(faster.summary, variant=way.name, exact=is_exact(way.name)))


def _stated(plan: Solved, least: CutWay | TransferWay, whole: Sequence[str] = ()) -> Solved:
    """Return the plan with the bound of all ways, and its distance to it.

    Args:
        plan: the plan.
        least: the way whose bound is the least.
        whole: the rewrites, where mixtures of them that were not planned are not bounded.
    """
    cuts = tuple(least.way.nodes[n].name for n in least.cuts)
    variant = EACH_WHOLE.join(whole) or least.name
    return with_bound(plan, Bound(least.bound_s, least.kind if cuts else "once", cuts, variant), PROVEN)
