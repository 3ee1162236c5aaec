"""Reads what is planned, and how, from `params.yaml`, for commands that plan in one process."""

from __future__ import annotations

from stowage.flows.planning.effort import Effort
from stowage.flows.planning.job import StepToPlan
from stowage.stages.options.parameters import search_of
from stowage.stages.settings import Settings
from stowage.stages.solve.parameters import o_ilp_limits
from stowage.stages.trace import MicroBatch
from stowage.stages.workload.configured import configured_optimizer, configured_workload
from stowage.stages.workload.models import resolve


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


def step_of(settings: Settings) -> StepToPlan:
    """Build the model with a batch, its optimizer and its loss; models by a name get no memory for their weights.

    Raises:
        StowageError: the model, its loss or its optimizer cannot be made.
    """
    trace = settings.trace
    workload = configured_workload(trace, fake=trace.model.callable is None)
    make = configured_optimizer(trace)
    return StepToPlan(
        model=workload.model,
        batch=workload.batch,
        loss=resolve(trace.loss, "trace.loss") if trace.loss else None,
        optimizer=make(list(workload.model.parameters())) if make else None,
        micro_batch=MicroBatch(ranks=trace.ranks),
    )
