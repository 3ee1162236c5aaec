"""Training steps with host memory and a disk as the lower tier, on the CPU: `fit` with the tiers of another machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from stowage.flows import fit
from stowage.flows.api import fit as _fit
from stowage.flows.api import planner
from stowage.flows.api.lower_tier import OpenableTier
from stowage.flows.api.training_step import TrainingStep
from stowage.flows.planning.costed import Costed, cost_step
from stowage.flows.planning.job import Costing, StepToPlan
from stowage.stages.device.tiers import HostAndDiskTier
from stowage.stages.ir.costs import DeviceDescription
from stowage.stages.ir.machine import BehindHost, Link
from stowage.stages.solve import LowerTier
from stowage.stages.workload.randomness import seeded
from tests.device.tiers.thread_lanes import host_and_disk

WIDTH, LAYERS = 256, 6
BATCH = (torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(0)),)
STATE_BYTES = 3 * 4 * LAYERS * WIDTH * WIDTH
"""Weights and AdamW's states, roughly."""

DEVICE = DeviceDescription(
    fingerprint="made-up",
    name="made up",
    type="cpu",
    memory_bytes=1 << 33,
    flops_per_s=5e10,
    memory_copy_bytes_per_s=10**10,
    disk_read_bytes_per_s=1e9,
    disk_write_bytes_per_s=1e9,
    disk_duplex_bytes_per_s=1e9,
    update_bytes_per_s=1e10,
    dispatch_s=5e-6,
)
"""Costs are estimated from its rates, so that no measurement decides where weights live."""


def network() -> nn.Module:
    """Layers that are worth moving; dropout, so that the random state matters."""
    with seeded(0):
        layers = [m for _ in range(LAYERS) for m in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
        return nn.Sequential(*layers, nn.Dropout(0.2), nn.Linear(WIDTH, 4))


def loss_of(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
    """A number."""
    del batch
    return outputs.pow(2).mean()


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """What it trains with."""
    return torch.optim.AdamW(list(parameters), lr=1e-2)


def host_and_disk_step(
    store: Path, folder: Path, model: nn.Module | None = None, *, cpu_update_bytes_per_s: float = 0.0, **more: Any
) -> TrainingStep:
    """In 40% of the memory of the training state, and with a host that holds less than the weights; with updates by the
    CPU in 60%, and their gradients are in the host too."""
    lower_tier = LowerTier(
        Link(1e9, 1e9),
        int((0.7 if cpu_update_bytes_per_s else 0.2) * STATE_BYTES),
        disk=BehindHost(Link(1e9, 1e9), 1 << 40),
        cpu_update_bytes_per_s=cpu_update_bytes_per_s,
    )
    lower = OpenableTier(lower_tier, lambda: host_and_disk(folder, chunk_bytes=1 << 16))

    def estimated(step: StepToPlan, how: Costing) -> Costed:
        return cost_step(step, replace(how, costs="roofline", target=DEVICE))

    with (
        mock.patch.object(_fit, "lower_tier_for", return_value=lower),
        mock.patch.object(planner, "cost_step", estimated),
    ):
        return fit(
            network() if model is None else model,
            BATCH,
            adamw,
            device_budget=STATE_BYTES * (3 if cpu_update_bytes_per_s else 2) // 5,
            loss=loss_of,
            method="offmate",
            cache_dir=store,
            quick=True,
            **more,
        )


def placements(step: TrainingStep) -> dict[str, set[str]]:
    """Of weights and states that are offloaded: place -> names, as the tier has them."""
    assert step.programs.offloading is not None
    tier = step.programs.offloading.tier
    assert isinstance(tier, HostAndDiskTier)
    names = set(step.programs.offloading.offloaded().values())
    return {"host": names - tier._on_disk, "disk": names & tier._on_disk}
