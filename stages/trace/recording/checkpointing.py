"""Switches off the user's own gradient checkpointing while a step is traced, because the plan replaces it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.checkpoint as checkpointing
from torch import nn

_GENERATORS = ("_checkpoint_without_reentrant_generator", "_checkpoint_without_reentrant_generator_impl")
"""The functions that run checkpointing that is not reentrant; which one is called depends on the release of torch."""


@contextmanager
def without_gradient_checkpointing(model: nn.Module, notices: list[str]) -> Iterator[None]:
    """Switch off the model's own gradient checkpointing and restore it afterwards.

    Models of `transformers` have a flag. Calls of `torch.utils.checkpoint` become plain calls; otherwise backward would
    record each recomputation, with random numbers of its own.
    """
    switched = [m for m in model.modules() if m.__dict__.get("gradient_checkpointing") is True]
    called: list[Any] = []
    for module in switched:
        module.gradient_checkpointing = False  # type: ignore[assignment]
    patched: Any = checkpointing
    before = {name: vars(patched)[name] for name in ("CheckpointFunction", *_GENERATORS) if name in vars(patched)}

    class Plain:
        """Replaces the reentrant kind."""

        @staticmethod
        def apply(function: Callable[..., Any], _preserve: bool, *arguments: Any) -> Any:
            called.append(function)
            # The reentrant kind also computes no gradients if no input requires them.
            with torch.set_grad_enabled(torch.is_grad_enabled() and any(map(_requires_grad, arguments))):
                return function(*arguments)

    def plain_generator(function: Any, *_arguments: Any, **_keywords: Any) -> Iterator[None]:
        called.append(function)
        yield

    vars(patched).update({name: plain_generator if name in _GENERATORS else Plain for name in before})
    try:
        yield
    finally:
        vars(patched).update(before)
        for module in switched:
            module.gradient_checkpointing = True  # type: ignore[assignment]
    count = len(switched) or len(called)
    if count:
        kind = "modules" if switched else "calls"
        notices.append(
            f"The model's own gradient checkpointing ({count} {kind}) is switched off: the plan replaces it."
        )


def _requires_grad(item: Any) -> bool:
    return isinstance(item, torch.Tensor) and item.requires_grad
