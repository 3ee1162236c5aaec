"""Finds the number of samples for which a planned step takes least time per sample (thesis 4.5.3): `best_batch`."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stowage.flows.api.choices import print_notice
from stowage.flows.api.fit import MakeOptimizer
from stowage.flows.api.lower_tier import lower_tier_for
from stowage.flows.api.offload import Offload, offload_of
from stowage.flows.planning.batch_sizes import BatchChoice, BatchPlanner, Resize, Say
from stowage.flows.planning.job import Planning, StepToPlan
from stowage.flows.planning.step import QUICK, Effort, stores_folder, target_device
from stowage.stages.ir.defaults import LARGEST_BATCH
from stowage.stages.ir.errors import ParameterError
from stowage.stages.runtime.files.weights import stand_ins
from stowage.stages.structure import tensors_of
from stowage.stages.trace import MicroBatch
from stowage.stages.workload.calls import Loss
from stowage.stages.workload.resize import resized, samples_of

SAMPLE = 4
"""Number of samples in the first batch that is traced, where `resize` makes the batches."""


def best_batch(
    model: nn.Module,
    batch: Any,
    optimizer: torch.optim.Optimizer | MakeOptimizer | None = None,
    *,
    device_budget: str | int,
    largest: int = LARGEST_BATCH,
    resize: Resize | None = None,
    loss: Loss | None = None,
    max_grad_norm: float | None = None,
    method: str = "auto",
    offload: Offload | None = None,
    host_budget: str | int | None = None,
    disk_budget: str | int | None = None,
    offload_dir: str | Path | None = None,
    cache_dir: str | Path | None = None,
    quick: bool = False,
    costs: str = "measured",
    say: Say = print_notice,
) -> BatchChoice:
    """Find the batch size with the least predicted time per sample within the budget, without training.

    The fractional optimum is estimated from `batch`, assuming that times and activations are proportional to the number
    of samples. Its two neighbours are then traced, profiled and planned like any batch, and beyond the better of them
    up to two more, while they are better still. Where neither fits, smaller ones are searched.

    Args:
        model: as in `fit`; it may be on the meta device, for weights are not needed.
        batch: a sample, with samples along the first dimension: tensors as long as the first of its tensors are
            resized, by slicing and repeating rows.
        optimizer: as in `fit`.
        device_budget: as in `fit`; a percentage is of plain PyTorch's peak on `batch`.
        largest: the largest batch size worth having.
        resize: makes a batch of another size, `resize(batch, size)`, where repeating rows will not do.
        loss: as in `fit`.
        max_grad_norm: as in `fit`.
        method: as in `fit`.
        offload: as in `fit`.
        host_budget: as in `fit`.
        disk_budget: as in `fit`.
        offload_dir: as in `fit`.
        cache_dir: as in `fit`.
        quick: as in `fit`.
        costs: `measured`, or `roofline` estimates from the device's rates.
        say: as in `fit`.

    Raises:
        Infeasible: not even one sample fits.
        TraceError: the model cannot be traced, or not with another batch size.
        ParameterError: an argument is wrong, or it is not known how to resize the batch.
    """
    if isinstance(largest, bool) or not isinstance(largest, int) or largest < 1:
        raise ParameterError(f"largest is {largest!r}: give the largest batch size worth having, 1 or more.")
    model, layouts = without_meta(model, batch, optimizer)
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer(list(model.parameters()))
    stores = stores_folder(cache_dir)
    target = target_device(next((p.device.type for p in model.parameters()), "cpu"), stores)
    lower = lower_tier_for(target, offload_of(offload, offload_dir, host_budget, disk_budget), method=method)
    if resize is not None:
        batch = resize(batch, min(SAMPLE, largest))
    step = StepToPlan(
        model=model,
        batch=batch,
        loss=loss,
        optimizer=optimizer,
        micro_batch=MicroBatch(max_grad_norm=max_grad_norm if optimizer is not None else None),
        layouts=layouts,
    )
    how = Planning(
        stores=stores,
        effort=QUICK if quick else Effort(),
        costs=costs,
        target=target,
        method=method,
        lower_tier=lower.lower_tier if lower else None,
    )
    samples = min(SAMPLE, largest) if resize is not None else samples_of(batch)
    planner = BatchPlanner(step=step, samples=samples, how=how, resize=resize or resized, say=say)
    return planner.choose(device_budget, largest)


def without_meta(
    model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer | MakeOptimizer | None
) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Return a model without meta tensors, a copy with stand-ins if need be, and the layouts of its meta parameters."""
    if not any(p.is_meta for p in model.parameters()):
        return model, {}
    if isinstance(optimizer, torch.optim.Optimizer):
        raise ParameterError(
            "Parameters on the meta device have no optimizer yet: pass a function that makes it, not a ready one."
        )
    tensors = tensors_of(batch)
    copied = copy.deepcopy(model)
    return copied, stand_ins(copied, tensors[0].device if tensors else "cpu")
