"""The settings and the outcome of a solve, equal for all solvers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["optimal", "feasible", "infeasible", "unknown"]


@dataclass(frozen=True)
class SolverSettings:
    """The limits and choices of a solve.

    Attributes:
        time_limit_s: stop after this many seconds. CP-SAT counts its own deterministic seconds, so that a loaded
            machine gives the same answer; a multiple of it in wall time is only a safety net.
        gap: relative gap at which an answer counts as optimal.
        seed: seed of the solver's random choices.
        threads: number of threads; only with one do equal inputs give equal answers.
    """

    time_limit_s: float = 60.0
    gap: float = 0.0
    seed: int = 0
    threads: int = 1


@dataclass(frozen=True)
class SolverOutcome:
    """The outcome of a solve.

    Attributes:
        status: "infeasible" and "optimal" are proofs; "unknown" means the limit came before any answer.
        objective: objective of the answer found; infinite without one.
        bound: proven lower bound on the objective (every model here is a minimisation).
        solver: name and version.
        wall_s: seconds taken.
    """

    status: Status
    objective: float
    bound: float
    solver: str
    wall_s: float

    @property
    def found(self) -> bool:
        """Return whether there is an answer to read."""
        return self.status in ("optimal", "feasible")

    @property
    def gap(self) -> float:
        """Return (objective − bound) / objective, at least 0; infinite without an answer."""
        if not self.found:
            return float("inf")
        return 0.0 if self.objective == 0 else max(0.0, (self.objective - self.bound) / abs(self.objective))
