"""Runs training loops: under the plan, with checkpoints; and plain PyTorch, to compare with."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from stowage.stages.device.peaks import AllocatorPeaks
from stowage.stages.ir.run import MemorySample, StepRecord, TraceSpan
from stowage.stages.runtime import Program
from stowage.stages.runtime.observe.measure import Measurement, measure_iteration, measure_program
from stowage.stages.runtime.observe.tracing import trace_iteration
from stowage.stages.runtime.offload.contents import Contents
from stowage.stages.train.checkpoint import save_checkpoint
from stowage.stages.train.frozen import FrozenTraining
from stowage.stages.train.restore import load_checkpoint

Batches = Callable[[int], Any]
Progress = Callable[[int], None]
Share = Callable[[StepRecord], StepRecord]
"""Returns the record of all processes that train together, from this one's."""
Result = TypeVar("Result")


def alone(record: StepRecord) -> StepRecord:
    """Return a record as it is, for a process alone."""
    return record


@dataclass
class TrainingRun:
    """The result of a loop: one record for each iteration, memory of the measured one, spans of the traced one."""

    records: list[StepRecord] = field(default_factory=list)
    samples: list[MemorySample] = field(default_factory=list)
    spans: list[TraceSpan] = field(default_factory=list)


def traced_iteration(start: int, steps: int, measure_every: int) -> int:
    """Return the iteration to trace: the last that the profiler does not slow down, else the last."""
    free = [i for i in range(start, steps) if measure_every == 0 or i % measure_every]
    return free[-1] if free else steps - 1


def memory_samples(series: str, measurement: Measurement) -> list[MemorySample]:
    """Return the device bytes after every allocator event."""
    used = measurement.resident_bytes
    found = [MemorySample(series, 0.0, used)]
    for event in measurement.events:
        used += event.nbytes
        found.append(MemorySample(series, event.time_s, used))
    return found


def _learning_rate(optimizer: torch.optim.Optimizer | None) -> float:
    return float(optimizer.param_groups[0]["lr"]) if optimizer is not None else math.nan


def _loop(
    series: str,
    start: int,
    steps: int,
    measure_every: int,
    batches: Batches,
    optimizer: torch.optim.Optimizer | None,
    scheduler: Any,
    step: Callable[[Any], torch.Tensor],
    measure: Callable[[Any], Measurement],
    run: TrainingRun,
    after: Callable[[int], None],
    share: Share,
) -> None:
    for iteration in range(start, steps):
        batch = batches(iteration)
        rate = _learning_rate(optimizer)
        allocator: AllocatorPeaks | None = None
        if measure_every and iteration % measure_every == 0:
            measurement = measure(batch)
            loss, peak, elapsed = measurement.loss, measurement.peak_bytes, measurement.elapsed_s
            run.samples = memory_samples(series, measurement)
            allocator = measurement.allocator
        else:
            began = time.perf_counter()
            loss, peak = float(step(batch)), -1
            elapsed = time.perf_counter() - began
        if scheduler is not None:
            scheduler.step()
        more = (allocator.requested_bytes, allocator.reserved_bytes, allocator.retries) if allocator else ()
        run.records.append(share(StepRecord(iteration, loss, math.nan, rate, elapsed, math.nan, peak, *more)))
        after(iteration + 1)


def train_planned(
    program: Program,
    contents: Contents,
    scheduler: Any,
    batches: Batches,
    *,
    steps: int,
    measure_every: int,
    checkpoint: Path,
    checkpoint_every: int,
    run_name: str,
    progress: Progress,
    share: Share = alone,
    frozen: FrozenTraining | None = None,
) -> TrainingRun:
    """Train what `contents` gives access to under the plan, from the checkpoint if there is one.

    `frozen` chooses the units that train in each step, where some are frozen.
    """
    model, optimizer = contents.model, contents.optimizer
    with program.around():
        program.enter()  # what rests in the lower tier goes there first: a checkpoint is then read within the budget
    load_frozen = frozen.load_state_dict if frozen is not None else None
    resumed = load_checkpoint(checkpoint, run_name, contents, scheduler, load_frozen=load_frozen)
    run = TrainingRun(records=list(resumed.records) if resumed else [])
    start = resumed.iteration if resumed else 0
    progress(start)

    def after(done: int) -> None:
        progress(done)
        if done % checkpoint_every == 0 and done < steps:
            state = frozen.state_dict() if frozen is not None else None
            save_checkpoint(checkpoint, run_name, done, contents, scheduler, run.records, state)

    traced = traced_iteration(start, steps, measure_every)

    def observed(work: Callable[[], Result]) -> Result:
        if frozen is not None:
            frozen.begin(program)
        if len(run.records) != traced:
            result = work()
        else:
            result, run.spans = trace_iteration(program, work)
        if frozen is not None:
            frozen.ended()
        return result

    _loop(
        "measured",
        start,
        steps,
        measure_every,
        batches,
        optimizer,
        scheduler,
        lambda batch: observed(lambda: program(batch)),
        lambda batch: observed(lambda: measure_program(program, model, optimizer, batch)),
        run,
        after,
        share,
    )
    return run


def train_eager(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    scheduler: Any,
    batches: Batches,
    loss_of: Callable[[Any], torch.Tensor],
    *,
    steps: int,
    measure_every: int,
    progress: Progress,
    staging_bytes: int = 0,
    share: Share = alone,
    frozen: FrozenTraining | None = None,
) -> TrainingRun:
    """Train with plain PyTorch: zero_grad, forward, backward, step; `staging_bytes` are in memory besides.

    What `frozen` does not let train requires no gradient in a step.
    """

    def iteration(batch: Any) -> torch.Tensor:
        for parameter in model.parameters():
            parameter.grad = None
        with frozen.in_plain(model) if frozen is not None else nullcontext():
            loss = loss_of(batch)
            if loss.requires_grad or frozen is None:
                loss.backward()  # type: ignore[no-untyped-call]
            with frozen.measured(model) if frozen is not None else nullcontext():
                if optimizer is not None:
                    optimizer.step()
        if frozen is not None:
            frozen.ended()
        return loss.detach()

    run = TrainingRun()

    def measure(batch: Any) -> Measurement:
        for parameter in model.parameters():
            parameter.grad = None
        return measure_iteration(iteration, model, optimizer, batch, [], staging_bytes)

    _loop("eager", 0, steps, measure_every, batches, optimizer, scheduler, iteration, measure, run, progress, share)
    return run
