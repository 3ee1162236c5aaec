"""Solves CP-SAT models of OR-Tools: deterministic, with a wall-clock safety net."""

from __future__ import annotations

import math
import sys
import time
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from types import ModuleType
from typing import Any

from stowage.stages.solver.lazy import LazyModule
from stowage.stages.solver.outcome import SolverOutcome, SolverSettings, Status

__all__ = ["CpAnswer", "cp_model", "cp_version", "load_cp_model", "solve_cp"]


def load_cp_model() -> ModuleType:
    """Load OR-Tools' CP-SAT.

    Raises:
        ImportError: highspy was loaded first, or OR-Tools is not installed.
    """
    try:
        return import_module("ortools.sat.python.cp_model")
    except ImportError as error:
        if "highspy" in sys.modules:
            raise ImportError(
                "OR-Tools cannot be loaded after highspy (or PuLP, which loads it): take pulp from "
                "stowage.stages.solver.milp."
            ) from error
        raise


cp_model: Any = LazyModule(load_cp_model)

# A deterministic second is about a second on an idle machine. The wall-clock limit is for a solver whose own clock
# stands still; it must not stop a run that shares its core with many others.
WALL_FACTOR = 30.0

_STATUS: dict[str, Status] = {
    "OPTIMAL": "optimal",
    "FEASIBLE": "feasible",
    "INFEASIBLE": "infeasible",
    "UNKNOWN": "unknown",
}


@dataclass(frozen=True)
class CpAnswer:
    """Outcome of a solve, with the values of its variables."""

    outcome: SolverOutcome
    _solver: Any

    def value(self, expression: Any) -> int:
        """Return the value of a variable or linear expression in the answer."""
        return int(self._solver.value(expression))


def solve_cp(model: Any, settings: SolverSettings, *, linear: bool = False) -> CpAnswer:
    """Minimise a `cp_model.CpModel`; hints in the model are its first incumbent.

    Args:
        model: the model.
        settings: limits of the solver.
        linear: put all that can be into the linear relaxation, for models whose linear constraints bound the objective.
            Otherwise there is no relaxation, for models that depend on `cumulative`, like blocks' retention intervals,
            which this and fewer rounds of presolve made a quarter faster.

    Raises:
        ValueError: the model itself is malformed (a formulation's bug).
    """
    solver = cp_model.CpSolver()
    parameters = solver.parameters
    parameters.num_workers = settings.threads
    parameters.interleave_search = settings.threads > 1
    parameters.random_seed = settings.seed
    parameters.max_deterministic_time = settings.time_limit_s
    parameters.max_time_in_seconds = settings.time_limit_s * WALL_FACTOR
    parameters.relative_gap_limit = settings.gap
    parameters.cp_model_probing_level = 0  # probing takes a third of the time, and changes no answer
    if linear:
        parameters.linearization_level = 2
    else:
        parameters.linearization_level = 0
        parameters.max_presolve_iterations = 1
    started = time.perf_counter()
    name = solver.status_name(solver.solve(model))
    if name not in _STATUS:
        raise ValueError(f"CP-SAT rejects the model: {model.validate()}")
    status = _STATUS[name]
    found = status in ("optimal", "feasible")
    outcome = SolverOutcome(
        status=status,
        objective=float(solver.objective_value) if found else math.inf,
        bound=float(solver.best_objective_bound) if status != "infeasible" else math.inf,
        solver=cp_version(),
        wall_s=time.perf_counter() - started,
    )
    return CpAnswer(outcome, solver)


def cp_version() -> str:
    """Return name and version, for reports and for keys of stored solutions."""
    return f"CP-SAT {version('ortools')}"
