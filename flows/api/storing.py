"""Writes and reads files of a training step: checkpoints, weights, states of the optimizer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stowage.flows.api import saving
from stowage.flows.api.frozen_steps import FrozenSteps
from stowage.stages.device import current
from stowage.stages.ir.errors import ParameterError
from stowage.stages.runtime.offload.contents import Contents
from stowage.stages.train import checkpoint, restore


class Storing(ABC):
    """Saves and loads tensor by tensor, within the budget; files are safetensors, complete or absent.

    Attributes:
        model: the model whose weights are saved.
        optimizer: the optimizer that holds the states, if there is one.
        frozen: what chooses the units that train in each step; None where nothing is ever frozen.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    frozen: FrozenSteps | None

    @abstractmethod
    def contents(self, call: str = "contents") -> Contents:
        """Return access to the tensors wherever they are, one at a time; `call` is what it is for."""

    def _refuse_waiting(self) -> None:
        if self.optimizer is None:  # gradients are the user's own
            return
        waiting = next((name for name, p in self.model.named_parameters() if p.grad is not None), None)
        if waiting is not None:
            raise ParameterError(
                f"The gradient of parameter '{waiting}' waits for an update, and a checkpoint has no gradients: save "
                "after the micro-batch that updates, or set the gradients to None to drop them."
            )

    def _device(self) -> torch.device | None:
        return next((p.device for p in self.model.parameters()), None)

    def save(self, path: str | Path, scheduler: Any = None) -> None:
        """Write a checkpoint: parameters, buffers, optimizer states, the schedule if given, the random state.

        One process writes a file. Of several ranks, which all call this, each writes what it has into a folder; `load`
        reads either, on any number of ranks.

        Raises:
            ParameterError: gradients of a micro-batch wait for an update: a checkpoint has none.
        """
        self._refuse_waiting()
        with current(self._device()):
            state = self.frozen.state_dict() if self.frozen is not None else None
            checkpoint.save_checkpoint(Path(path), "", 0, self.contents("save"), scheduler, [], state)

    def load(self, path: str | Path, scheduler: Any = None) -> None:
        """Continue from what `save` wrote: the numbers that follow are those of a run that was not interrupted.

        Gradients that wait are dropped. Where the file cannot be used nothing is changed.

        Raises:
            StowageError: there is no such file, it is damaged, or of another model, optimizer or schedule.
        """
        with current(self._device()):
            load = self.frozen.load_state_dict if self.frozen is not None else None
            found = restore.load_checkpoint(Path(path), "", self.contents("load"), scheduler, restore.HINT, load)
        if found is None:
            raise ParameterError(f"There is no checkpoint at {path}.")

    def save_model(self, path: str | Path) -> None:
        """Write weights and persistent buffers as `state_dict` names them; `safetensors.torch.load_model` reads it."""
        saving.save_model(Path(path), self.contents("save_model"))

    def load_model(self, path: str | Path) -> None:
        """Replace weights and persistent buffers by those of a safetensors file."""
        saving.load_model(Path(path), self.contents("load_model"))

    def save_optimizer(self, path: str | Path) -> None:
        """Write the optimizer's `state_dict` as safetensors; `load_optimizer` reads it."""
        checkpoint.save_optimizer(Path(path), self.contents("save_optimizer"))

    def load_optimizer(self, path: str | Path) -> None:
        """Replace the optimizer's groups and states by those of a file."""
        restore.load_optimizer(Path(path), self.contents("load_optimizer"))

    def save_pretrained(self, folder: str | Path) -> None:
        """Write what `model.save_pretrained(folder)` of a `transformers` or `peft` model writes."""
        saving.save_pretrained(Path(folder), self.contents("save_pretrained"))
