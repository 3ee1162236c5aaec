"""`stow`: a Hugging Face Trainer whose training steps run within a memory budget, with the same numbers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from stowage.flows._fit import Say, TrainingStep, make_step, print_notice
from stowage.stages.ir.errors import ParameterError

AnyTrainer = TypeVar("AnyTrainer")


def stow(
    trainer: AnyTrainer,
    *,
    device_budget: str | int,
    method: str = "auto",
    host_budget: str | int | None = None,
    disk_budget: str | int | None = None,
    offload_dir: str | Path | None = None,
    cache_dir: str | Path | None = None,
    quick: bool = False,
    say: Say = print_notice,
) -> AnyTrainer:
    """Let `trainer.train()` run every training step under a plan within `device_budget`.

    The script stays as it is: logging, evaluation, saving, resuming, schedules and callbacks work as before, and
    losses, `grad_norm` and weights are those of the plain Trainer bit for bit. A batch of another shape (a partial last
    one, another padded length) is planned when it first appears.

    Forward, backward, clipping and updates happen inside the training step; when the Trainer then calls
    `clip_grad_norm_`, `optimizer.step()` and `zero_grad()`, no gradients are left to work on. So callbacks see none
    either. Evaluation is not planned: it runs as the Trainer runs it.

    Args:
        trainer: a `transformers.Trainer`, or one of a subclass; its own `compute_loss` and `training_step` are traced.
        device_budget, method, host_budget, disk_budget, offload_dir, cache_dir, quick, say: see `fit`.

    Returns:
        the same trainer.

    Raises:
        ParameterError: this trainer cannot be planned for; the text says why.
    """
    if not callable(getattr(trainer, "training_step", None)) or not hasattr(trainer, "accelerator"):
        raise ParameterError(f"stow takes a transformers.Trainer, but this is a {type(trainer).__name__}.")
    _refuse(trainer)
    options = {
        "device_budget": device_budget,
        "method": method,
        "host_budget": host_budget,
        "disk_budget": disk_budget,
        "offload_dir": offload_dir,
        "cache_dir": cache_dir,
        "quick": quick,
        "say": say,
    }
    if isinstance(trainer.training_step, _Stowed):  # type: ignore[attr-defined]
        raise ParameterError("This Trainer already runs under plans: call stow once.")
    stowed = _Stowed(trainer, options)
    trainer.training_step = stowed  # type: ignore[attr-defined]
    for name in _NEED_WEIGHTS:
        if callable(getattr(trainer, name, None)):
            setattr(trainer, name, stowed.with_weights(getattr(trainer, name)))
    return trainer


_NEED_WEIGHTS = ("evaluation_loop", "save_model", "_save_checkpoint", "_load_best_model", "_load_from_checkpoint")
"""What a Trainer does with weights or optimizer states outside of training steps."""


def _refuse(trainer: Any) -> None:
    """What spreads the step over several devices or scales its loss is not planned."""
    arguments = trainer.args
    reasons = {
        "it shards the model with FSDP": getattr(trainer, "is_fsdp_enabled", False),
        "it runs DeepSpeed": getattr(trainer, "is_deepspeed_enabled", False),
        "it trains on several devices": getattr(arguments, "world_size", 1) > 1 or getattr(arguments, "n_gpu", 1) > 1,
        "fp16 scales the loss by what earlier steps gave (use bf16)": trainer.accelerator.scaler is not None,
        "torch_compile hides the model's operations": getattr(arguments, "torch_compile", False),
    }
    for reason, holds in reasons.items():
        if holds:
            raise ParameterError(f"The training step of this Trainer cannot be planned: {reason}.")


class _Stowed:
    """Takes the place of `trainer.training_step`.

    Attributes:
        step: the training step of the latest call.
    """

    def __init__(self, trainer: Any, options: dict[str, Any]) -> None:
        self._trainer = trainer
        self._original = trainer.training_step
        self._options = options
        self._belongs_to: tuple[Any, ...] = ()
        self._norm: torch.Tensor | None = None
        self.step: TrainingStep | None = None

    def __call__(
        self, model: nn.Module, inputs: Mapping[str, Any], num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        trainer = self._trainer
        model.train()
        if isinstance(num_items_in_batch, int):  # as a number it would be part of the plan
            num_items_in_batch = torch.tensor(num_items_in_batch, device=trainer.args.device)
        batch = {
            "inputs": _plain(trainer._prepare_inputs(inputs)),
            "num_items_in_batch": num_items_in_batch,
            "micro_batches": getattr(trainer, "current_gradient_accumulation_steps", None),
        }
        step = self._step_of(model, batch)
        self._watch_clipping()
        update = bool(trainer.accelerator.sync_gradients)
        loss = step(batch, update=update)
        self._norm = step.grad_norm if update else None
        return loss.detach()

    def with_weights(self, work: Callable[..., Any]) -> Callable[..., Any]:
        """`work`, with every parameter and optimizer state on the device while it runs."""

        @functools.wraps(work)
        def run(*arguments: Any, **keywords: Any) -> Any:
            with self.step.on_device() if self.step is not None else nullcontext():
                return work(*arguments, **keywords)

        return run

    def _step_of(self, model: nn.Module, batch: Any) -> TrainingStep:
        """The training step for the Trainer's present model, optimizer and arguments."""
        trainer = self._trainer
        limit = trainer.args.max_grad_norm
        norm = float(limit) if limit is not None and limit > 0 else float("inf")  # then it is logged all the same
        optimizer = trainer.optimizer
        while type(optimizer).__name__ == "AcceleratedOptimizer":
            optimizer = optimizer.optimizer
        accumulate = trainer.args.gradient_accumulation_steps
        belongs_to = (model, optimizer, norm, accumulate)
        if self.step is None or any(a is not b and a != b for a, b in zip(self._belongs_to, belongs_to)):
            self._belongs_to = belongs_to
            _refuse(trainer)
            self.step = make_step(
                model,
                optimizer,
                objective=self._objective,
                accumulate=accumulate,
                max_grad_norm=norm,
                **self._options,
            )
            if batch["micro_batches"] in (None, accumulate):
                self.step.prepare_cycle(batch)  # so that a budget that is too small is known before training starts
        return self.step

    def _objective(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """The loss that the Trainer's own step hands to backward: scaled as it scales it, autocast and all."""
        losses: list[torch.Tensor] = []

        def backward(loss: torch.Tensor, **_: Any) -> None:
            losses.append(loss)

        with _replaced(self._trainer.accelerator, "backward", backward):
            self._original(model, dict(batch["inputs"]), batch["num_items_in_batch"])
        if len(losses) != 1:
            raise ParameterError(
                f"{type(self._trainer).__name__}.training_step calls accelerator.backward {len(losses)} times: a "
                "planned step has one loss."
            )
        return losses[0]

    def _watch_clipping(self) -> None:
        """Gradients are clipped and gone when the Trainer asks for their norm: answer with what it was."""
        accelerator = self._trainer.accelerator
        if getattr(accelerator.clip_grad_norm_, "of", None) is self:
            return
        original = accelerator.clip_grad_norm_

        def clip_grad_norm_(parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
            norm, self._norm = self._norm, None
            return original(parameters, max_norm, norm_type) if norm is None else norm

        clip_grad_norm_.of = self  # type: ignore[attr-defined]
        accelerator.clip_grad_norm_ = clip_grad_norm_


def _plain(item: Any) -> Any:
    """Mappings of any class as dictionaries, whose parts tracing sees."""
    if isinstance(item, Mapping):
        return {key: _plain(value) for key, value in item.items()}
    return item


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute of one object, exchanged for a while."""
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
