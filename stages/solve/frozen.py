"""Plans a step that freezes: its memory is that of the worst mask, its time that of the mean one.

Planners see the step in which everything trains, with a budget that is larger than what was asked for. What a plan
takes under its worst mask is then solved for (`formulations.freezing`), and judged by the referee. The planners' budget
is searched for by bisection, between the budget itself, whose plans fit under every mask, and the memory in which
everything is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from stowage.stages.formulations.freezing.worst_mask import WorstMask, worst_mask
from stowage.stages.freezing.levels import levels_of
from stowage.stages.freezing.projection import Guarded
from stowage.stages.freezing.stored import guarded_plan, replayed_tier
from stowage.stages.freezing.times import mean_times, mean_with_copies
from stowage.stages.ir.actions import STARTS
from stowage.stages.ir.errors import NO_PLAN
from stowage.stages.ir.freezable import Freezable
from stowage.stages.ir.graph import ComputeNode
from stowage.stages.ir.plan import plan_hash
from stowage.stages.ir.trace import TraceTables
from stowage.stages.ir.units import names_in
from stowage.stages.rewrite import Way
from stowage.stages.simulate.lower_tier import ReplayedTier
from stowage.stages.solve.offload.tier import LowerTier
from stowage.stages.solve.summary import PROVEN, Solved, suffices
from stowage.stages.solver.outcome import SolverSettings

HALVINGS = 6
"""Times that the interval of the planners' budgets is halved."""

MOST_BYTES = 1 << 50
"""A budget within which everything is kept."""

WORST_MASK_S = 20.0
"""Time limit of one solve for the worst mask at a row."""

Solve = Callable[[int], Solved]
"""Returns the plan of the step in which everything trains, within so many bytes of the device."""


def freezing_plan(
    trace: TraceTables,
    nodes: Sequence[ComputeNode],
    solved: Solved,
    freezable: Freezable,
    budget_bytes: int,
    lower_tier: LowerTier | None = None,
) -> Solved:
    """Return a plan as one that freezes: with its units, and with what it takes under the worst and the mean mask.

    Args:
        trace: the trace that the plan is of.
        nodes: its compute nodes.
        solved: the plan of the step in which everything trains.
        freezable: what may be frozen.
        budget_bytes: the budget that was asked for.
        lower_tier: the lower tier, if the plan may use one.

    Raises:
        AssertionError: the referee finds another peak than was solved for.
    """
    plan = guarded_plan(trace, nodes, solved.rows, solved.slots, freezable.units)
    s = solved.summary
    tier = replayed_tier(plan, s.baseline_bytes)
    worst, peak_bytes = worst_peak(plan, freezable.active, tier)
    mean_s, once_s = mean_times(plan, freezable.active)
    copies = bool(solved.slots) and lower_tier is not None
    if copies and lower_tier is not None:
        tier = replace(tier, link=lower_tier.link, disk=lower_tier.disk.link if lower_tier.disk is not None else None)
    if copies or any(step.kind in STARTS for step in plan.steps):
        mean_s = max(mean_s, mean_with_copies(plan, freezable.active, tier))
    gap = max(0.0, 1 - once_s / mean_s)
    status = "optimal" if gap < PROVEN else "heuristic"
    return Solved(
        solved.rows,
        replace(
            s,
            plan_hash=plan_hash(solved.rows, trace.meta.configuration_hash, budget_bytes, repr(freezable)),
            device_budget_bytes=budget_bytes,
            device_peak_bytes=peak_bytes,
            step_time_s=mean_s,
            lower_bound_s=min(once_s, mean_s),
            status=status,
            gap=0.0 if status == "optimal" else gap,
            units=len(freezable.units),
            active_units=freezable.active,
            worst_units=tuple(names_in(freezable.units, worst.mask)),
            worst_bound_bytes=max(peak_bytes, min(worst.bound_bytes, s.device_peak_bytes)),
            all_active_bytes=s.device_peak_bytes,
            all_active_time_s=s.step_time_s,
        ),
        solved.slots,
        list(freezable.units),
    )


def keeping_plan(plan: Solved) -> Solved:
    """Return a plan that keeps everything, compared with itself: with what it takes where a part is frozen."""
    s = plan.summary
    return replace(
        plan,
        summary=replace(
            s,
            keep_all_peak_bytes=s.device_peak_bytes,
            keep_all_time_s=s.step_time_s,
            smallest_feasible_bytes=min(s.smallest_feasible_bytes, s.device_peak_bytes),
        ),
    )


def most_bytes(plan: Solved) -> int:
    """Return the bytes that a plan which freezes is proven not to exceed, whatever trains."""
    return plan.summary.worst_bound_bytes


def worst_peak(plan: Guarded, active: int, tier: ReplayedTier) -> tuple[WorstMask, int]:
    """Return the worst mask, and the peak under it as the referee finds it.

    Raises:
        AssertionError: the referee finds more than was solved for.
    """
    levels = levels_of(plan, tier.staging_bytes)
    worst = worst_mask(levels, len(plan.units), active, SolverSettings(WORST_MASK_S))
    peak_bytes = plan.under(worst.mask).replay(tier=tier).peak_bytes
    if peak_bytes != worst.nbytes:
        raise AssertionError(f"the worst mask takes {worst.nbytes} bytes as solved, and {peak_bytes} as replayed")
    return worst, peak_bytes


def solve_freezing(
    solve: Solve,
    way_of: Callable[[str], Way],
    freezable: Freezable,
    budget_bytes: int,
    lower_tier: LowerTier | None,
    enough: float = 0.0,
) -> Solved:
    """Return the plan that is fastest under the mean mask, of those that fit under the worst.

    Args:
        solve: plans the step in which everything trains.
        way_of: returns the trace and nodes of a variant by its name.
        freezable: what may be frozen.
        budget_bytes: the budget of the device.
        lower_tier: the lower tier, if plans may use one.
        enough: no plan is looked for beside one that takes at most so many times as long as what is proven for it.

    Raises:
        Infeasible: no plan that was found fits under its worst mask.
    """

    def judged(nbytes: int) -> Solved:
        solved = solve(nbytes)
        way = way_of(solved.summary.variant)
        return freezing_plan(way.trace, way.nodes, solved, freezable, budget_bytes, lower_tier)

    def fits(plan: Solved) -> bool:
        return most_bytes(plan) <= budget_bytes

    everything = keeping_plan(judged(MOST_BYTES))
    if fits(everything):
        return everything
    low, high = budget_bytes, everything.summary.all_active_bytes
    found: list[Solved] = []
    try:
        found.append(judged(low))
    except NO_PLAN as failure:
        low = failure.smallest_feasible_bytes
        leanest = judged(low)
        if not fits(leanest):
            raise failure.of(budget_bytes, most_bytes(leanest)) from None
        found.append(leanest)
    for _ in range(HALVINGS):
        if high - low < 2 or any(suffices(plan, enough) for plan in found):
            break
        middle = (low + high) // 2
        plan = judged(middle)
        if fits(plan):
            found.append(plan)
            low = middle
        else:
            high = middle
    smallest = min(map(most_bytes, found))
    best = min(found, key=lambda plan: plan.summary.step_time_s)
    keep = everything.summary
    return replace(
        best,
        summary=replace(
            best.summary,
            keep_all_peak_bytes=keep.device_peak_bytes,
            keep_all_time_s=keep.step_time_s,
            smallest_feasible_bytes=smallest,
        ),
    )
