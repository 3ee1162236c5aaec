"""A network whose training state is worth moving to a disk, for all that the disk's buffers take."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from stowage.stages.workload.randomness import seeded

WIDTH, LAYERS = 1024, 5
BATCH = (torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(0)),)


def network() -> nn.Module:
    """Layers of 4 MiB; dropout, so that the random state matters."""
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
