"""In the place of the door to MILP solvers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stowage.stages.solver.milp import Choice, MilpSolver, solve_milp
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
        choices: Sequence[Choice] = (),
        **how: Any,
    ) -> SolverOutcome:
        if problem.isMIP() and not choices:  # which are rounded, and need no start
            self.starts.append(warm_start and problem.valid(1e-5))
        return solve_milp(problem, settings, solver=solver, warm_start=warm_start, choices=choices, **how)
