"""Reads how steps are planned from `params.yaml`, for commands that plan in one process."""

from __future__ import annotations

from stowage.flows.planning.effort import Effort
from stowage.stages.options.parameters import search_of
from stowage.stages.settings import Settings
from stowage.stages.solve.parameters import o_ilp_limits


def effort_of(settings: Settings) -> Effort:
    """Return the effort that the stages of the pipeline make.

    Raises:
        ParameterError: a formulation has an unknown name.
    """
    grid, solver = search_of(settings.options)
    return Effort(
        seconds_per_call=settings.profile.seconds_per_call,
        min_samples=settings.profile.min_samples,
        grid=grid,
        solver=solver,
        o_ilp=o_ilp_limits(settings),
        slots=settings.solve.memory_slots,
    )
