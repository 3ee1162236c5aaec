"""Answers of formulations over an H-Graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from stowage.stages.formulations.cluster.problem import HProblem
from stowage.stages.formulations.cluster.staged_order import HRuns, cost_of, schedule_of, timeline
from stowage.stages.ir.block import SolveReport
from stowage.stages.ir.h_graph import HSchedule

Budgets = tuple[int, int]
"""The pair (M_peak, M_save), in bytes."""


@dataclass(frozen=True)
class HAnswer:
    """The answer of a formulation for one pair of budgets.

    Attributes:
        budgets: (M_peak, M_save), bytes.
        feasible: False where there is provably no schedule; None where the limit came before any answer.
        runs: executions, to start the next solve from.
        schedule: the executions as rows.
        report: status, time and bound.
    """

    budgets: Budgets
    feasible: bool | None
    runs: HRuns | None = None
    schedule: HSchedule | None = None
    report: SolveReport | None = None


def answer_of(
    data: HProblem,
    budgets: Budgets,
    runs: HRuns,
    status: Literal["optimal", "feasible", "heuristic"],
    bound_s: float,
    name: str,
) -> HAnswer:
    """Make the answer from executions; `bound_s` is capped at their time."""
    events = timeline(data, runs)
    objective_s = cost_of(data, events).time_s
    report = SolveReport.bounded(name, status, objective_s, bound_s)
    return HAnswer(budgets, True, runs, schedule_of(data, events), report)


def no_answer(budgets: Budgets, feasible: bool | None, bound_s: float, name: str) -> HAnswer:
    """Make the answer that there is provably no schedule, or that the limit came first."""
    if feasible is False:
        return HAnswer(budgets, False)
    return HAnswer(budgets, None, report=SolveReport.bounded(name, "feasible", float("inf"), bound_s))
