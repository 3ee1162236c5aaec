"""Reads limits of this stage's solves from `params.yaml`."""

from __future__ import annotations

from stowage.stages.settings import Settings
from stowage.stages.solver.outcome import SolverSettings


def o_ilp_limits(settings: Settings) -> SolverSettings:
    """Return time limit, gap and seed of one solve of O-ILP."""
    wanted = settings.solve
    return SolverSettings(time_limit_s=wanted.time_limit_s, gap=wanted.gap, seed=settings.options.seed)
