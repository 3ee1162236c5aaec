"""Lets `state_dict` raise an error while tensors are offloaded, instead of giving the NaN that stand for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from stowage.stages.ir.errors import OffloadedError

_off: ContextVar[bool] = ContextVar("off", default=False)

FirstOffloaded = Callable[[Any], str | None]
"""Returns the name of something offloaded in a module or an optimizer."""


@contextmanager
def unguarded() -> Iterator[None]:
    """Let `state_dict` give what stands for offloaded tensors inside, for those who look at its names alone."""
    before = _off.set(True)
    try:
        yield
    finally:
        _off.reset(before)


class _Hook:
    """A hook that does nothing in copies and pickles of its module or optimizer."""

    def __init__(self, first_offloaded: FirstOffloaded | None = None, where: str = "offloaded") -> None:
        self._first_offloaded = first_offloaded
        self._where = where

    def _offloaded(self, owner: Any) -> str | None:
        return self._first_offloaded(owner) if self._first_offloaded is not None and not _off.get() else None

    def __reduce__(self) -> tuple[type[_Hook], tuple[()]]:
        return type(self), ()


class _BeforeGiving(_Hook):
    def __call__(self, owner: Any, _prefix: str = "", keep_vars: bool = False) -> None:
        """Refuse offloaded tensors; with `keep_vars`, give the tensors themselves, whatever their content."""
        name = self._offloaded(owner) if not keep_vars else None
        if name is not None:
            raise OffloadedError(
                f"{type(owner).__name__}.state_dict() was called while '{name}' is {self._where}: write a file with "
                "step.save_model, save_pretrained, save_optimizer or save, or call it inside of `with "
                "step.on_device():`, which brings everything."
            )


class _BeforeTaking(_Hook):
    def __call__(self, owner: Any, _state_dict: Any) -> None:
        name = self._offloaded(owner)
        if name is not None:
            raise OffloadedError(
                f"{type(owner).__name__}.load_state_dict() was called while '{name}' is {self._where}: use "
                "step.load_optimizer or step.load, which put each tensor where it lives."
            )


def guard_module(module: nn.Module, first_offloaded: FirstOffloaded, where: str = "offloaded") -> list[RemovableHandle]:
    """Let `state_dict` of the module and of its parts refuse from now on if `first_offloaded` names something.

    Returns:
        What takes the guards away again.
    """
    guard = _BeforeGiving(first_offloaded, where)
    return [part.register_state_dict_pre_hook(guard) for part in module.modules()]  # type: ignore[no-untyped-call]


def guard_optimizer(
    optimizer: torch.optim.Optimizer, first_offloaded: FirstOffloaded, where: str = "offloaded"
) -> list[RemovableHandle]:
    """Let the optimizer's `state_dict` and `load_state_dict` refuse if `first_offloaded` names something.

    Returns:
        What takes the guards away again.
    """
    return [
        optimizer.register_state_dict_pre_hook(_BeforeGiving(first_offloaded, where)),
        optimizer.register_load_state_dict_pre_hook(_BeforeTaking(first_offloaded, where)),
    ]
