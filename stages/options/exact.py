"""Which formulation solves a block, or a cluster of nodes alone, for one pair of budgets."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, NamedTuple

from stowage.stages.formulations.block.checkmate import checkmate
from stowage.stages.formulations.block.retention import solve_executions
from stowage.stages.formulations.block.rk_checkmate.solve import rk_checkmate
from stowage.stages.formulations.block.staged_order import Executions, StagedGraph, schedule_of, timeline
from stowage.stages.ir.block import BlockGraph, BlockSchedule, SolveReport
from stowage.stages.solver.outcome import SolverSettings

Exact = Literal["retention", "rk_checkmate", "checkmate"]
"""Retention intervals on CP-SAT; RK-Checkmate (thesis 2.4) and Checkmate (Jain et al. 2020) on HiGHS, which take longer
for the same answer or, with Checkmate, for one that is no better."""

_FEW = 2
"""Computations of a node that are tried first. Where two suffice a third makes tight schedules of some blocks up to 9%
faster, but not the plans of GPT-2 and a Transformer at any budget tried, and it takes five times as long to prove.
Without it some small budgets cannot be met."""

_SHORT = 1 / 16
"""Of the limit, for a third computation where backward nodes may run again too: proving took eight times as long as
finding what is at most 2% slower on a Transformer's blocks."""


_RIVALS: tuple[Exact, ...] = ("rk_checkmate", "checkmate")

SAME = 1.0 + 1e-9
"""Times are sums of floats in different orders."""


class Answer(NamedTuple):
    """A schedule, how it was found, and where the next solve may start; see `retention`."""

    schedule: BlockSchedule | None
    report: SolveReport | None
    executions: Executions | None


def solve_exactly(
    formulation: Exact,
    block: BlockGraph,
    budgets: tuple[int, int],
    settings: SolverSettings,
    *,
    computations: int,
    within: Executions | None,
    near: Executions | None,
) -> Answer:
    """The fastest schedule within M_peak and M_save, bytes.

    Args:
        formulation: which.
        block: graph to schedule.
        budgets: M_peak and M_save.
        settings: limits of the solver.
        computations: of one node at most, for budgets that two of each node do not meet; Checkmate and RK-Checkmate
            know no such limit.
        within: executions within both budgets.
        near: executions within similar ones.
    """
    if formulation != "retention":
        return Answer(*_checkmate(formulation, block, budgets, settings, within))
    few = min(_FEW, computations)
    executions, report = solve_executions(block, *budgets, settings, computations=few, hint=within or near)
    came_first = report is not None and within is None  # the limit, and it would again
    if executions is None and computations > few and not came_first:
        executions, report = _more_computations(block, budgets, settings, computations, within or near)
    if executions is None:
        return Answer(None, report, None)
    staged = StagedGraph.of(block)
    return Answer(schedule_of(staged, timeline(staged, executions)), report, executions)


def raced(answer: Answer, block: BlockGraph, budgets: tuple[int, int], settings: SolverSettings) -> Answer:
    """The fastest of an answer and what RK-Checkmate and Checkmate find, which may run a node as often as they like."""
    for formulation in _RIVALS:
        rival = Answer(*_checkmate(formulation, block, budgets, settings, answer.executions))
        if rival.schedule is None or rival.report is None:
            continue
        if (
            answer.schedule is None
            or answer.report is None
            or rival.report.objective_s * SAME < answer.report.objective_s
        ):
            answer = rival
    return answer


def _checkmate(
    formulation: Exact,
    block: BlockGraph,
    budgets: tuple[int, int],
    settings: SolverSettings,
    within: Executions | None,
) -> tuple[BlockSchedule | None, SolveReport | None, None]:
    solve = rk_checkmate if formulation == "rk_checkmate" else checkmate
    return *solve(block, *budgets, settings, hint=within), None


def _more_computations(
    block: BlockGraph,
    budgets: tuple[int, int],
    settings: SolverSettings,
    computations: int,
    hint: Executions | None,
) -> tuple[Executions | None, SolveReport | None]:
    """Backward nodes once, which is quickly proven; then whatever is faster, for a part of the time."""
    once, report = solve_executions(
        block, *budgets, settings, computations=computations, recompute_backward=False, hint=hint
    )
    short = replace(settings, time_limit_s=settings.time_limit_s * _SHORT)
    found, improved = solve_executions(block, *budgets, short, computations=computations, hint=once or hint)
    if found is not None or once is None or report is None or improved is None:
        return found, improved
    # The bound holds for schedules that compute backward nodes again too.
    return once, replace(report, status="feasible", bound_s=min(report.objective_s, improved.bound_s))
