"""Saves and loads the files of a Hugging Face Trainer tensor by tensor, while weights and states are offloaded."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stowage.flows.api import saving
from stowage.flows.api.trainer.freezing import FrozenFiles
from stowage.flows.api.trainer.ranks import ranks_of
from stowage.flows.api.trainer.resuming import SetAside
from stowage.flows.api.training_step import TrainingStep
from stowage.stages.ir.errors import ParameterError

_RESUME = (
    "A Trainer on several ranks goes on from a checkpoint in its first train() alone: start the processes again, and "
    "call train(resume_from_checkpoint=...)."
)
_MODEL, _OPTIMIZER = "model.safetensors", "optimizer.pt"


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute of one object inside the block."""
    own = name in vars(owner)
    before = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


class TrainerFiles:
    """Replaces a Trainer's methods that save and load, and calls the originals where nothing is offloaded.

    Attributes:
        set_aside: optimizer states that were loaded before the first step of several ranks was planned.
        frozen: what chooses the units that train, where something is frozen.
    """

    def __init__(self, trainer: Any, step: Callable[[], TrainingStep | None]) -> None:
        """Replace the methods; `step` returns the present training step."""
        self._trainer = trainer
        self._step = step
        self.set_aside = SetAside(trainer)
        self.frozen = FrozenFiles()
        mine: dict[str, Callable[..., None]] = {
            "_save": self._save,
            "_save_optimizer_and_scheduler": self._save_optimizer,
            "_load_optimizer_and_scheduler": self._load_optimizer,
            "_load_from_checkpoint": self._load_from_checkpoint,
            "_load_best_model": self._load_best_model,
        }
        for name, method in mine.items():
            original = getattr(trainer, name, None)
            if callable(original):
                setattr(trainer, name, self._wrapped(method, original))

    def _wrapped(self, method: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def run(*arguments: Any, **keywords: Any) -> Any:
            step = self._step()
            if method == self._save_optimizer and arguments:
                self.frozen.save(Path(arguments[0]), step)
            if method == self._load_optimizer and arguments and arguments[0] is not None:
                self.frozen.load(Path(arguments[0]), step)
            if step is None and method == self._load_optimizer and ranks_of(self._trainer) > 1:
                return self.set_aside.load(original, *arguments, **keywords)
            if step is None or not (step.offloads or step.shards):
                return original(*arguments, **keywords)
            return method(step, original, *arguments, **keywords)

        return run

    def _save(
        self, step: TrainingStep, original: Callable[..., None], output_dir: str | None = None, state_dict: Any = None
    ) -> None:
        """Save the weights, and what the Trainer writes beside them."""
        model = self._trainer.model
        if state_dict is not None or model is not step.model:
            original(output_dir, state_dict)
        elif hasattr(model, "save_pretrained"):  # all ranks write the weights together, and one of them the rest
            with replaced(model, "save_pretrained", lambda folder, **_: None):
                original(output_dir)
            step.save_pretrained(output_dir or self._trainer.args.output_dir)
        else:
            original(output_dir, {})
            step.save_model(Path(output_dir or self._trainer.args.output_dir) / _MODEL)

    def _save_optimizer(self, step: TrainingStep, original: Callable[..., None], output_dir: str) -> None:
        class Nothing:
            def state_dict(self) -> dict[str, Any]:
                return {}

        with replaced(self._trainer, "optimizer", Nothing()):
            original(output_dir)
        saving.save_optimizer_for_torch(Path(output_dir) / _OPTIMIZER, step.contents())

    def _load_optimizer(self, step: TrainingStep, original: Callable[..., None], checkpoint: str | None) -> None:
        if checkpoint is not None and step.shards:
            raise ParameterError(_RESUME)
        if checkpoint is not None:
            step.contents().forget_states()
        original(checkpoint)

    def _load_from_checkpoint(
        self, step: TrainingStep, original: Callable[..., None], checkpoint: str, model: Any = None
    ) -> None:
        if (model is None or model is step.model) and self._load(step, Path(checkpoint)):
            return
        with step.on_device(_trained(step)):
            original(checkpoint, model)

    def _load_best_model(self, step: TrainingStep, original: Callable[..., None]) -> None:
        if self._load(step, Path(self._trainer.state.best_model_checkpoint)):
            return
        with step.on_device(_trained(step)):
            original()

    def _load(self, step: TrainingStep, folder: Path) -> bool:
        """Read a whole model's weights, if these are what the folder holds."""
        if not (folder / _MODEL).is_file():
            return False
        step.load_model(folder / _MODEL)
        return True


def _trained(step: TrainingStep) -> list[str] | None:
    """Return the names of adapter weights where the model has adapters, which alone are loaded; else None for all."""
    if not hasattr(step.model, "peft_config"):
        return None
    return [name for name, parameter in step.model.named_parameters() if parameter.requires_grad]
