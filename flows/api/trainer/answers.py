"""Answers a Trainer that asks for the gradients' norm, or for an update, after a planned step."""

from __future__ import annotations

import functools
import types
from typing import Any

import torch


class Answers:
    """Stands between a Trainer and the functions that it calls after its training step.

    Attributes:
        norm: norm of the latest step's gradients before clipping; None where the step updated nothing.
        updated: the latest step has updated all parameters in one call of the optimizer.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.norm: torch.Tensor | None = None
        self.updated = False

    def watch(self) -> None:
        """Answer for the accelerator and the optimizer that the Trainer has now."""
        self._watch_clipping()
        self._watch_updates()

    def _watch_clipping(self) -> None:
        """Return the norm from before clipping when the Trainer clips: gradients are clipped and freed by then."""
        accelerator = self._trainer.accelerator
        if getattr(accelerator.clip_grad_norm_, "of", None) is self:
            return
        original = accelerator.clip_grad_norm_

        def clip_grad_norm_(parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
            norm, self.norm = self.norm, None
            return original(parameters, max_norm, norm_type) if norm is None else norm

        clip_grad_norm_.of = self  # type: ignore[attr-defined]
        accelerator.clip_grad_norm_ = clip_grad_norm_

    def _watch_updates(self) -> None:
        """Skip the Trainer's call of an optimizer that has updated already, or it would count another step."""
        optimizer = self._trainer.optimizer
        if type(optimizer).__name__ != "AcceleratedOptimizer" or getattr(optimizer.step, "of", None) is self:
            return
        original = optimizer.step

        @functools.wraps(original)
        def step(_optimizer: Any, closure: Any = None) -> Any:
            done, self.updated = self.updated, False
            return None if done else original(closure)

        step.of = self  # type: ignore[attr-defined]
        optimizer.step = types.MethodType(step, optimizer)  # a method, as schedules expect
