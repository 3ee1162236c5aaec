"""In the place of the door to MILP solvers."""

from __future__ import annotations

import math
from typing import Any

from stowage.stages.solver.milp import MilpSolver, solve_milp
from stowage.stages.solver.outcome import SolverOutcome, SolverSettings


class Door:
    """The solver's door: notes which programs with integers start from what, and leaves their solving out if asked."""

    def __init__(self, *, solves_integers: bool = True) -> None:
        self.solves_integers = solves_integers
        self.starts: list[bool] = []

    def __call__(
        self, problem: Any, settings: SolverSettings, *, solver: MilpSolver = "highs", warm_start: bool = False
    ) -> SolverOutcome:
        if problem.isMIP():
            self.starts.append(warm_start and problem.valid(1e-5))
            if not self.solves_integers:
                return SolverOutcome("unknown", math.inf, -math.inf, "none", 0.0)
        return solve_milp(problem, settings, solver=solver, warm_start=warm_start)
