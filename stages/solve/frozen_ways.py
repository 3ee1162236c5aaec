"""Plans a step that freezes with and without codes for what is frozen, and keeps the faster plan.

Planners see the step in which everything trains. Codes that stand for a value only while something is frozen would
take memory there and spare none. So plans with them are looked for apart from the others, each within the memory of its
own worst mask, and compared by the time under the mean mask. So are exact plans: one that is slower where everything
trains may be the faster one under the mean mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from stowage.stages.ir.errors import NO_PLAN, Infeasible, NoRoomInLowerTier
from stowage.stages.ir.freezable import Freezable
from stowage.stages.ir.variant import VariantName
from stowage.stages.rewrite import Way, is_asked, is_for_freezing, needed_variant
from stowage.stages.solve.frozen import MOST_BYTES, freezing_plan, keeping_plan, solve_freezing
from stowage.stages.solve.offload.tier import LowerTier
from stowage.stages.solve.request import EXACT, TOGETHER
from stowage.stages.solve.summary import PROVEN, Solved
from stowage.stages.solve.variants import preferred

SolveWay = Callable[[int, str], Solved]
"""Returns the plan of the step in which everything trains, within so many bytes, of one rewrite if it is named."""


def solve_frozen_ways(
    solve: SolveWay,
    ways: Sequence[Way],
    freezable: Freezable,
    budget_bytes: int,
    lower_tier: LowerTier | None,
    enough: float = 0.0,
) -> Solved:
    """Return the plan that is fastest under the mean mask, of those that fit under the worst.

    Args:
        solve: plans the step in which everything trains; without a name not with codes for what is frozen; see
            `PlanRequest.rewrite`.
        ways: the trace as it was recorded and its rewrites.
        freezable: what may be frozen.
        budget_bytes: the budget of the device.
        lower_tier: the lower tier, if plans may use one.
        enough: see `solve_freezing`; what there is leave for is looked for in any case.

    Raises:
        Infeasible: no plan that was found fits under its worst mask; the one that needs least is reported.
    """
    way_of = partial(needed_variant, ways)
    names = dict.fromkeys(VariantName.of(way.name).rewrite for way in ways if is_for_freezing(way.name))
    kinds = {is_asked(way.name) for way in ways if not is_for_freezing(way.name)}
    first = (EXACT, TOGETHER) if len(kinds) > 1 else ("",)
    found: list[Solved] = []
    failures: list[Infeasible | NoRoomInLowerTier] = []
    for name in (*first, *names):
        try:
            own = partial(_named, solve, name)
            found.append(solve_freezing(own, way_of, freezable, budget_bytes, lower_tier, enough))
        except NO_PLAN as failure:
            if not names and first == ("",):
                raise
            failures.append(failure)
            continue
        if name == first[0] and not found[0].summary.recomputed_bytes and not found[0].slots:
            break
    if not found:
        raise min(failures, key=lambda failure: failure.smallest_feasible_bytes)
    if len(found) + len(failures) == 1:
        return found[0]
    return _beside(found, failures, _everything(solve, way_of, freezable, budget_bytes, lower_tier))


def _named(solve: SolveWay, name: str, nbytes: int) -> Solved:
    return solve(nbytes, name)


def _everything(
    solve: SolveWay,
    way_of: Callable[[str], Way],
    freezable: Freezable,
    budget_bytes: int,
    lower_tier: LowerTier | None,
) -> Solved:
    """Return the plan that keeps everything without codes for what is frozen, fit it or not."""
    solved = solve(MOST_BYTES, "")
    way = way_of(solved.summary.variant)
    return keeping_plan(freezing_plan(way.trace, way.nodes, solved, freezable, budget_bytes, lower_tier))


def _beside(found: Sequence[Solved], failures: Sequence[Infeasible | NoRoomInLowerTier], everything: Solved) -> Solved:
    """Return the preferred plan, with what all of them together say of the step."""
    best, keep = preferred(found), everything.summary
    least_s = min(s.summary.lower_bound_s for s in [*found, everything])
    gap = max(0.0, 1 - least_s / best.summary.step_time_s)
    smallest = [s.summary.smallest_feasible_bytes for s in found] + [f.smallest_feasible_bytes for f in failures]
    return replace(
        best,
        summary=replace(
            best.summary,
            keep_all_peak_bytes=keep.keep_all_peak_bytes,
            keep_all_time_s=keep.keep_all_time_s,
            smallest_feasible_bytes=min(smallest),
            lower_bound_s=least_s,
            status="optimal" if gap < PROVEN else "heuristic",
            gap=0.0 if gap < PROVEN else gap,
        ),
    )
