"""Answers for one pair of budgets, and how retention intervals are used to find them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from stowage.stages.formulations.block.retention import solve_executions
from stowage.stages.formulations.block.staged_order import Executions, StagedGraph, schedule_of, timeline
from stowage.stages.ir.block import BlockGraph, BlockSchedule, SolveReport
from stowage.stages.solver.outcome import SolverSettings

_FEW = 2
"""Computations of a node that are tried first.

With a third, tight schedules of some blocks are up to 9% faster than with two, but not the plans of GPT-2 and a
Transformer at any budget tried, and proving takes five times as long. Without it some small budgets cannot be met.
"""

_SHORT = 1 / 16
"""Share of the time limit for a third computation where backward nodes may run again too.

Proving took eight times as long as finding a schedule that is at most 2% slower on a Transformer's blocks.
"""


class IntervalAnswer(NamedTuple):
    """A schedule, how it was found, and executions from which the next solve may start; see `retention`."""

    schedule: BlockSchedule | None
    report: SolveReport | None
    executions: Executions | None


@dataclass(frozen=True)
class Starts:
    """The starting points of a solve.

    Attributes:
        computations: the most computations of a node, for budgets that two of each node do not meet; formulations
            without such a limit ignore it.
        within: executions within both budgets.
        near: executions within similar budgets.
    """

    computations: int
    within: Executions | None = None
    near: Executions | None = None


ExactSolve = Callable[[BlockGraph, tuple[int, int], SolverSettings, Starts], IntervalAnswer]
"""Finds the fastest schedule of a block for (M_peak, M_save) in bytes, the solver's limits, and starts."""

Solve = Callable[..., tuple[BlockSchedule | None, SolveReport | None]]
"""Returns schedule and report, or None and None, for (block, M_peak, M_save, limits, hint=executions or None)."""


def answering(solve: Solve) -> ExactSolve:
    """Wrap a formulation that finds one schedule and returns no executions."""

    def answer(block: BlockGraph, budgets: tuple[int, int], settings: SolverSettings, starts: Starts) -> IntervalAnswer:
        return IntervalAnswer(*solve(block, *budgets, settings, hint=starts.within), None)

    return answer


def retention_intervals(
    block: BlockGraph, budgets: tuple[int, int], settings: SolverSettings, starts: Starts
) -> IntervalAnswer:
    """Solve by retention intervals: few computations of each node first, more where those do not meet the budgets."""
    within, hint = starts.within, starts.within or starts.near
    few = min(_FEW, starts.computations)
    executions, report = solve_executions(block, *budgets, settings, computations=few, hint=hint)
    came_first = report is not None and within is None  # more computations would hit the time limit too
    if executions is None and starts.computations > few and not came_first:
        executions, report = _more_computations(block, budgets, settings, starts.computations, hint)
    if executions is None:
        return IntervalAnswer(None, report, None)
    staged = StagedGraph.of(block)
    return IntervalAnswer(schedule_of(staged, timeline(staged, executions)), report, executions)


def _more_computations(
    block: BlockGraph,
    budgets: tuple[int, int],
    settings: SolverSettings,
    computations: int,
    hint: Executions | None,
) -> tuple[Executions | None, SolveReport | None]:
    """Run backward nodes once, which is quickly proven; then search for anything faster, for a part of the time."""
    once, report = solve_executions(
        block, *budgets, settings, computations=computations, recompute_backward=False, hint=hint
    )
    short = replace(settings, time_limit_s=settings.time_limit_s * _SHORT)
    found, improved = solve_executions(block, *budgets, short, computations=computations, hint=once or hint)
    if found is not None or once is None or report is None or improved is None:
        return found, improved
    # The bound holds for schedules that compute backward nodes again too.
    return once, replace(report, status="feasible", bound_s=min(report.objective_s, improved.bound_s))
