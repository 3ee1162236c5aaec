"""A run that is cut off and goes on: the same model, optimizer, schedule and batches every time."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stowage.stages.runtime.offload.contents import Contents
from stowage.stages.train.loop import TrainingRun, train_planned
from stowage.stages.workload.randomness import seeded
from tests.runtime.beside_eager import prepare, program_of
from tests.solve.prepared import Prepared
from tests.zoo import Entry


class Small(nn.Module):
    """Dropout, so that the random state matters; statistics, so that buffers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, 16),
            nn.BatchNorm1d(16),
            nn.ReLU(),
            nn.Dropout(0.3),
            nn.Linear(16, 16),
            nn.Tanh(),
            nn.Linear(16, 2),
        )

    def forward(self, x: torch.Tensor) -> Any:
        return self.layers(x)


def build() -> Entry:
    """The model, a batch, and the loss."""
    with seeded(0):
        return Small(), {"x": torch.randn(8, 6)}, lambda outputs, _: outputs.pow(2).mean()


def batch_at(iteration: int) -> dict[str, torch.Tensor]:
    """A pure function of the iteration."""
    return {"x": torch.randn(8, 6, generator=torch.Generator().manual_seed(iteration))}


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Groups with settings of their own."""
    parameters = list(model.parameters())
    groups = [{"params": parameters[:3], "weight_decay": 0.1}, {"params": parameters[3:], "betas": (0.8, 0.9)}]
    return torch.optim.AdamW(groups, lr=1e-2)


class CutOffError(Exception):
    """Stands in for a kill."""


@dataclass
class SmallRun:
    """One process's worth of training."""

    prepared: Prepared = field(default_factory=lambda: prepare(build, adamw))

    def __post_init__(self) -> None:
        self.model = build()[0]
        self.optimizer = adamw(self.model)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 20)
        self.program = program_of(self.prepared, self.prepared.smallest(), self.model, self.optimizer)

    def train(self, checkpoint: Path, steps: int, every: int = 2, name: str = "run", die_at: int = -1) -> TrainingRun:
        """Train; raise `CutOffError` after `die_at` iterations."""

        def progress(done: int) -> None:
            if done == die_at:
                raise CutOffError

        torch.manual_seed(11)
        with torch.random.fork_rng(devices=[]):
            return train_planned(
                self.program,
                Contents(self.model, self.optimizer, self.program.offloading),
                self.schedule,
                batch_at,
                steps=steps,
                measure_every=0,
                checkpoint=checkpoint,
                checkpoint_every=every,
                run_name=name,
                progress=progress,
            )
