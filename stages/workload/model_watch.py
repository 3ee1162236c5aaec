"""Keeps the signature of a model and takes it anew only when something in it has changed, which is rare."""

from __future__ import annotations

from operator import itemgetter
from typing import Any

import torch
from torch import nn

from stowage.stages.structure.tree import ModuleTree
from stowage.stages.workload.signature import (
    HOOKS,
    ModelSignature,
    context,
    model_signature,
    plain_attributes,
)

_OF_MODULES = frozenset(vars(nn.Module()))
"""Attributes that every module has: its tables, which are checked elsewhere."""


class ModelWatch:
    """Watches one model for changes.

    Attributes:
        tree: its parameters and buffers, as they were when `signature` was last asked for.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.tree = ModuleTree(model)
        self._signature: ModelSignature | None = None
        self._version = 0
        self._modules: list[tuple[nn.Module, type, dict[str, Any], list[str], Any, list[type], Any, Any, int]] = []
        self._tensors: list[tuple[torch.Tensor, torch.Size, torch.dtype, bool, int]] = []

    def signature(self) -> ModelSignature:
        """Return what `model_signature` gives; the same object as before where nothing has changed."""
        version = self.tree.look()
        if version != self._version or self._signature is None or not self._same():
            self._signature = model_signature(self._model)
            self._version = version
            self._note()
        return self._signature

    def _note(self) -> None:
        self._modules = []
        for module in self.tree.modules:
            state = vars(module)
            names = [name for name, _ in plain_attributes(state)] + ["forward"] * ("forward" in state)
            # At least two names, so that `itemgetter` returns tuples.
            look = itemgetter("training", "_modules", *names)
            own = itemgetter("training", "_modules", *(name for name in state if name not in _OF_MODULES))
            types = [*map(type, own(state))]
            self._modules.append((module, type(module), state, [*state], own, types, look, look(state), _hooks(state)))
        tensors = [*self.tree.parameters.values(), *self.tree.buffers.values()]
        self._tensors = [(t, t.shape, t.dtype, t.requires_grad, _tensor_hooks(t)) for t in tensors]

    def _same(self) -> bool:
        assert self._signature is not None
        for module, kind, state, names, own, types, look, values, hooks in self._modules:
            if (
                type(module) is not kind
                or [*state] != names
                or [*map(type, own(state))] != types
                or look(state) != values
                or _hooks(state) != hooks
            ):
                return False
        for tensor, shape, dtype, grad, hooks in self._tensors:
            if (
                tensor.requires_grad is not grad
                or tensor.shape != shape
                or tensor.dtype is not dtype
                or _tensor_hooks(tensor) != hooks
            ):
                return False
        return context() == self._signature.context


def _hooks(state: dict[str, Any]) -> int:
    first, second, third, fourth = HOOKS
    if state[first] or state[second] or state[third] or state[fourth]:
        return sum(len(state[name]) for name in HOOKS)
    return 0


def _tensor_hooks(tensor: torch.Tensor) -> int:
    return len(tensor._backward_hooks or ()) + len(tensor._post_accumulate_grad_hooks or ())
