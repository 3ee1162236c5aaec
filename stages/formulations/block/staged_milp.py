"""Shares what integer programs over the staged order have in common: their data, and how they are solved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from stowage.stages.formulations.block.staged_order import Executions, StagedGraph, memory_unit
from stowage.stages.ir.block import BlockGraph, BlockSchedule, SolveReport
from stowage.stages.solver.milp import MilpSolver, pulp, solve_milp
from stowage.stages.solver.outcome import SolverSettings

_LARGEST_MEMORY = 1_000_000


@dataclass
class StagedMilp:
    """Holds the data of an integer program over the staged order, and the program.

    Attributes:
        graph: the block, in the staged order.
        peak: M_peak, in memory units, rounded down.
        save: M_save, in memory units, rounded down.
        unit: bytes of a memory unit; sizes round up.
        problem: the program.
    """

    graph: StagedGraph
    peak: int
    save: int
    unit: int
    problem: Any

    @classmethod
    def of(cls, name: str, block: BlockGraph, peak_bytes: int, save_bytes: int) -> Self:
        """Make the data and variables of the model; its name is that of the formulation."""
        graph = StagedGraph.of(block)
        unit = memory_unit(graph, (peak_bytes, save_bytes), _LARGEST_MEMORY)
        return cls(graph, peak_bytes // unit, save_bytes // unit, unit, pulp.LpProblem(name, pulp.LpMinimize))

    @property
    def T(self) -> int:  # noqa: N802
        """Return the number of stages and of nodes."""
        return len(self.graph.nodes)


M = TypeVar("M", bound=StagedMilp)


def solve_staged(
    model: M,
    settings: SolverSettings,
    solver: MilpSolver,
    hint: Executions | None,
    *,
    start: Callable[[M, Executions], None],
    read: Callable[[M], tuple[BlockSchedule, float]],
) -> tuple[BlockSchedule | None, SolveReport | None]:
    """Solve a model with its equations.

    Args:
        model: the model.
        settings: limits of the solver.
        solver: "highs" or "cbc".
        hint: executions of a schedule within both budgets, as a warm start.
        start: gives every variable its value in the schedule of a hint.
        read: reads the schedule, with its seconds of computing.

    Returns:
        Schedule and report; `(None, None)` where there is provably no schedule; `(None, report)` with status
        "feasible" and an infinite objective where the limit came first.
    """
    if hint is not None:
        start(model, hint)
    outcome = solve_milp(model.problem, settings, solver=solver, warm_start=hint is not None)
    if outcome.status == "infeasible":
        return None, None
    if not outcome.found:
        return None, SolveReport.of_solver(model.problem.name, "feasible", float("inf"), outcome.bound)
    schedule, objective_s = read(model)
    return schedule, SolveReport.of_solver(model.problem.name, outcome.status, objective_s, outcome.bound)
