"""Builds the workload that params.yaml describes."""

from __future__ import annotations

from stowage.stages.settings.models import TraceSettings
from stowage.stages.workload.models import Workload, build_workload
from stowage.stages.workload.optimizers import MakeOptimizer, optimizer_factory
from stowage.stages.workload.samples import Batch, sample_batch


def configured_workload(trace: TraceSettings, *, fake: bool = False) -> Workload:
    """Build model and sample batch of the trace section; see `build_workload`."""
    source = trace.model
    return build_workload(
        source.architecture,
        source.overrides,
        source.directory,
        source.callable,
        batch_size=trace.batch_size,
        sequence_length=trace.sequence_length,
        seed=trace.seed,
        fake=fake,
    )


def more_batches(trace: TraceSettings, workload: Workload, count: int) -> list[Batch]:
    """Return a workload's batch with others like it, `count` together; that alone where the user's function made it."""
    if trace.model.callable is not None:
        return [workload.batch]
    seeds = range(trace.seed + 1, trace.seed + count)
    size, length = trace.batch_size, trace.sequence_length
    return [workload.batch, *(sample_batch(workload.model, size, length, seed) for seed in seeds)]


def configured_optimizer(trace: TraceSettings) -> MakeOptimizer | None:
    """Return a function from parameters to an optimizer, or None where gradients are left in `.grad`."""
    if trace.optimizer is None:
        return None
    return optimizer_factory(trace.optimizer.name, trace.optimizer.arguments)
