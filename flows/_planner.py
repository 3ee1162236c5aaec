"""Plans one model within one budget: training steps on any batch, and forwards."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from stowage.flows._effort import Effort
from stowage.flows._evaluation import Resting, plan_forward
from stowage.flows._planned import Planned
from stowage.flows._planning import plan_step
from stowage.stages.optimizers import KnownOptimizer
from stowage.stages.solve import Below
from stowage.stages.trace import MicroBatch, Recorded, RecordedForward


@dataclass
class Planner:
    """Attributes are arguments of `plan_step`."""

    model: nn.Module
    optimizer: KnownOptimizer | None
    device_budget: str | int
    method: str
    home: Path
    effort: Effort
    below: Below | None

    def training_step(
        self,
        batch: Any,
        recorded: Recorded,
        micro_batch: MicroBatch,
        largest: MicroBatch | None,
        away: frozenset[str],
    ) -> Planned:
        """The plan of a training step; see `plan_step`."""
        return plan_step(
            self.model,
            batch,
            loss=None,
            optimizer=self.optimizer,
            device_budget=self.device_budget,
            method=self.method,
            home=self.home,
            recorded=recorded,
            micro_batch=micro_batch,
            largest=largest,
            effort=self.effort,
            below=self.below,
            away=away,
        )

    def forward(self, recorded: RecordedForward, resting: Resting) -> Planned:
        """The plan of a forward alone; see `plan_forward`."""
        return plan_forward(self.model, recorded, resting, home=self.home, effort=self.effort, below=self.below)
