"""In the place of the door to MILP solvers."""

from __future__ import annotations

from typing import Any

from stowage.stages.solver.milp import MilpSolver, solve_milp
from stowage.stages.solver.outcome import SolverOutcome, SolverSettings


class Door:
    """Notes which programs with integers start from something feasible."""

    def __init__(self) -> None:
        self.starts: list[bool] = []

    def __call__(
        self,
        problem: Any,
        settings: SolverSettings,
        *,
        solver: MilpSolver = "highs",
        warm_start: bool = False,
        interior_points: bool = False,
    ) -> SolverOutcome:
        if problem.isMIP():
            self.starts.append(warm_start and problem.valid(1e-5))
        return solve_milp(problem, settings, solver=solver, warm_start=warm_start, interior_points=interior_points)
