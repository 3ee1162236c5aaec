"""States how far plans are from the optimum, and takes schedules that cuts have found where they are faster."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from stowage.stages.ir.plan import PlanSummary
from stowage.stages.ir.variant import VariantName
from stowage.stages.rewrite import Way
from stowage.stages.solve.cuts.race import improve_all
from stowage.stages.solve.cuts.way import CutWay
from stowage.stages.solve.program.of_trace import program_of
from stowage.stages.solve.proposal import Decision, JudgedPlan, Proposal
from stowage.stages.solve.referee import Referee
from stowage.stages.solve.request import PlanRequest
from stowage.stages.solve.select import updated_together
from stowage.stages.solve.summary import KeepingAll, Solved, solved
from stowage.stages.solver.milp import milp_version

METHOD = "cuts"
"""The method of plans whose schedules cuts have found."""

SHARE = 0.2
"""Share of the time that planning took so far which cuts may take."""

LEAST_SECONDS = 0.2
"""Time that they may take however fast planning was: enough for one cut of a small step."""

PROVEN = 1e-3
"""Relative distance to the bound within which a plan counts as optimal."""


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


def proven(plans: Sequence[Planned], request: PlanRequest) -> list[Solved]:
    """Return plans, some of which are faster now, with the bound of all ways in each.

    Args:
        plans: the ways, each with its plan.
        request: what was asked for; nothing is bounded where a plan may offload or ranks exchange something.
    """
    known = [p.plan for p in plans if p.plan is not None]
    collective = any(n.collective for p in plans for n in p.way.nodes)
    if not request.cut_seconds or request.lower_tier is not None or collective or not known:
        return known
    ways = _ways(plans, request.device_budget_bytes)
    improve_all(ways, seconds_of(request, time.monotonic()))
    least = min(ways, key=lambda w: w.bound_s)
    return [_stated(_faster(p.way, p.plan, ways, request), least) for p in plans if p.plan is not None]


def seconds_of(request: PlanRequest, now_s: float) -> float:
    """Return the time that cuts may take.

    Args:
        request: what was asked for.
        now_s: the clock of `time.monotonic`.
    """
    if request.planning_since_s is None:
        return request.cut_seconds
    return min(request.cut_seconds, max(LEAST_SECONDS, SHARE * (now_s - request.planning_since_s)))


def _ways(plans: Sequence[Planned], budget_bytes: int) -> list[CutWay]:
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
    return [
        CutWay(p.way, program_of(p.way.trace, p.way.nodes), p.plan.rows if p.plan is not None else [], budget_bytes)
        for p in best.values()
    ]


def _time_s(planned: Planned) -> float:
    return planned.plan.summary.step_time_s if planned.plan is not None else math.inf


def _faster(way: Way, plan: Solved, ways: Sequence[CutWay], request: PlanRequest) -> Solved:
    """Return the schedule that cuts have found of a way, as a plan, if it is faster; else the plan."""
    found = next((w for w in ways if w.way is way), None) if request.method == "auto" else None
    if found is None or found.found is None:
        return plan
    program, budget_bytes = found.program, request.device_budget_bytes
    referee = Referee(program, budget_bytes)
    decision = Decision(f"{METHOD}, {milp_version()}", "feasible", None, request.cut_seconds)
    proposal = Proposal(method=METHOD, steps=program.steps(found.found), decision=decision)
    judged: JudgedPlan = updated_together(way.trace, way.nodes, referee.judge(proposal), referee, budget_bytes)
    if judged.time_s >= plan.summary.step_time_s:
        return plan
    s = plan.summary
    keeping_all = KeepingAll(s.keep_all_peak_bytes, s.keep_all_time_s)
    smallest = min(s.smallest_feasible_bytes, judged.peak_bytes)
    faster = solved(way.trace, way.nodes, judged, keeping_all, smallest, request, s.lower_bound_s)
    return replace(faster, summary=replace(faster.summary, variant=s.variant, exact=s.exact))


def _stated(plan: Solved, least: CutWay) -> Solved:
    """Return the plan with the bound of all ways, and its distance to it."""
    s: PlanSummary = plan.summary
    bound_s = min(least.bound_s, s.step_time_s)  # the same times, added up in another order
    gap = 1 - bound_s / s.step_time_s
    status = "optimal" if gap <= PROVEN else "feasible" if s.status == "optimal" else s.status
    stated = replace(
        s,
        bound_s=bound_s,
        bound_kind="cuts" if least.cuts else "once",
        bound_cuts=tuple(least.way.nodes[n].name for n in least.cuts),
        bound_variant=least.way.name,
        status=status,
        gap=gap,
    )
    return replace(plan, summary=stated)
