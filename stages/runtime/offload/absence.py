"""Lets a module that would read offloaded parameters raise an error, instead of computing with NaN.

The hook is on all modules, not on the model's own: modules with hooks take other kernels
(`nn.TransformerEncoderLayer`), are pickled with them, and count as changed. Traces run on stand-ins for the parameters,
so the hook does not see them.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from stowage.stages.ir.errors import OffloadedError


class Absent:
    """The offloaded parameters of one model; whoever refers to this object refers to the parameters too.

    Attributes:
        lending: True while whoever calls modules reloads what they need.
    """

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self.lending = False
        _known.add(self)
        weakref.finalize(self, _unhook)
        _hook()

    def add(self, parameter: torch.Tensor, name: str) -> None:
        """Note that the parameter's content has left the device."""
        self._names[id(parameter)] = name

    def discard(self, parameter: torch.Tensor) -> None:
        """Note that the parameter's content is back on the device."""
        self._names.pop(id(parameter), None)

    def within(self, module: nn.Module) -> str | None:
        """Return the name of a parameter in `module` that is offloaded."""
        if not self._names or self.lending:
            return None
        return next((self._names[id(p)] for p in module.parameters() if id(p) in self._names), None)


_known: weakref.WeakSet[Absent] = weakref.WeakSet()
_handles: list[RemovableHandle] = []


def _refuse(module: nn.Module, _arguments: Any) -> None:
    for absent in tuple(_known):
        name = absent.within(module)
        if name is not None:
            raise OffloadedError(
                f"{type(module).__name__} was called while its parameter '{name}' is offloaded: call "
                "step.evaluate(batch), which brings what it needs within the budget, or call the model inside of "
                "`with step.on_device() as model:`, which brings everything."
            )


_refuse.steers_nothing = True  # type: ignore[attr-defined]  # no part of what a trace depends on


def _hook() -> None:
    if not _handles:
        _handles.append(register_module_forward_pre_hook(_refuse))


def _unhook() -> None:
    """Remove the hook after the last model, so that modules are called as before."""
    if not tuple(_known):
        while _handles:
            _handles.pop().remove()
