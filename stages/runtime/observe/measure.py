"""Measures the peak of an iteration: what is in memory before it, plus the allocator's own events during it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from stowage.stages.device import AllocatorEvent, device_of, unique_bytes
from stowage.stages.device.peaks import AllocatorPeaks
from stowage.stages.ir.amounts import size_text, time_text
from stowage.stages.optimizers import tensors_in
from stowage.stages.runtime.program import Program
from stowage.stages.structure import tensors_of


@dataclass(frozen=True)
class Measurement:
    """One measured iteration.

    Attributes:
        loss: the iteration's loss.
        resident_bytes: in memory before it: parameters, buffers, gradients, optimizer states, batch, constants.
        peak_bytes: highest device bytes during it, everything included; on a GPU whatever the process has there.
        elapsed_s: its wall time; recording the events is in it, starting the profiler is not.
        events: the allocator's events; empty on devices that keep totals only.
        allocator: on a GPU, the allocator's own peaks and retries.
    """

    loss: float
    resident_bytes: int
    peak_bytes: int
    elapsed_s: float
    events: list[AllocatorEvent]
    allocator: AllocatorPeaks | None = None

    def __repr__(self) -> str:
        return (
            f"<one measured iteration: loss {self.loss:.9g}, {time_text(self.elapsed_s)}\n"
            f" peak {size_text(self.peak_bytes)}, of which {size_text(self.resident_bytes)} were in memory before; "
            f"{self._allocator_text()}>"
        )

    def _allocator_text(self) -> str:
        found = self.allocator
        if found is None:
            return f"{len(self.events)} events of the allocator"
        return (
            f"the allocator was asked for {size_text(found.requested_bytes)}, gave {size_text(found.allocated_bytes)} "
            f"and held {size_text(found.reserved_bytes)}, with {found.retries} retries"
        )


def resident_tensors(model: nn.Module, optimizer: torch.optim.Optimizer | None, batch: Any) -> list[torch.Tensor]:
    """Return everything that is in memory between iterations."""
    parameters = list(model.parameters())
    found: list[torch.Tensor] = [*parameters, *model.buffers()]
    found += [p.grad for p in parameters if p.grad is not None]
    if optimizer is not None:
        found += tensors_in(optimizer)
    return [*found, *tensors_of(batch)]


def measure_iteration(
    run: Any,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    batch: Any,
    extra: list[torch.Tensor],
    staging_bytes: int = 0,
) -> Measurement:
    """Run one iteration, `run(batch)`, under the profiler; `extra` and `staging_bytes` are in memory too."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    tensors = [*resident_tensors(model, optimizer, batch), *extra]
    resident = unique_bytes(tensors) + staging_bytes
    measured = device_of(device).measure(lambda: run(batch), tensors)
    peak = resident + measured.peak_bytes
    if measured.allocator is not None:  # also counts what libraries keep, and whatever else the process has there
        peak = measured.allocator.allocated_bytes
    return Measurement(float(measured.result), resident, peak, measured.elapsed_s, measured.events, measured.allocator)


def measure_program(
    program: Program,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    batch: Any,
    run: Callable[[Any], torch.Tensor] | None = None,
) -> Measurement:
    """Run one iteration of a generated step under the profiler; `run` does more than `program` alone."""
    program.enter()
    return measure_iteration(run or program, model, optimizer, batch, program.resident(), program.staging_bytes)
