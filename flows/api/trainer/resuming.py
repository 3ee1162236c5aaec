"""Brings optimizer states that a Trainer has loaded into a step of several ranks, each of which has shards of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from stowage.flows.api.trainer.ranks import group_of
from stowage.flows.api.training_step import TrainingStep
from stowage.stages.runtime.offload.contents import Contents
from stowage.stages.train.checkpoint import save_optimizer

_FILE = "optimizer-of-all-ranks.safetensors"


class SetAside:
    """Keeps whole states in a file of the Trainer's output folder between their loading and the first plan."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._path: Path | None = None

    def load(self, original: Callable[..., None], checkpoint: str | None) -> None:
        """Let the Trainer load whole states, and set them aside: a plan starts from shards."""
        original(checkpoint)
        optimizer = plain(self._trainer.optimizer)
        if not optimizer.state:
            return
        self._path = Path(self._trainer.args.output_dir).absolute() / _FILE
        if self._trainer.args.process_index == 0:
            save_optimizer(self._path, Contents(self._trainer.model, optimizer))
        dist.barrier(group_of(self._trainer))
        optimizer.state.clear()

    def bring(self, step: TrainingStep) -> None:
        """Give each rank its shards of what was set aside, once its step is planned."""
        if self._path is None:
            return
        path, self._path = self._path, None
        step.load_optimizer(path)
        dist.barrier(group_of(self._trainer))
        if self._trainer.args.process_index == 0:
            path.unlink()


def plain(optimizer: Any) -> Any:
    """Return the optimizer that accelerate has wrapped."""
    while type(optimizer).__name__ == "AcceleratedOptimizer":
        optimizer = optimizer.optimizer
    return optimizer
