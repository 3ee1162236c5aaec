"""Leaves a model and an optimizer as they were if sharding fails in the middle."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


class _Before:
    """What `fully_shard` changes in a module: its class, its parameters, its hooks, and the state that it adds."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = [
            (module, type(module), {key: _shallow(item) for key, item in vars(module).items()})
            for module in model.modules()
        ]
        self._tensors = [(t, t.data, t.grad) for t in [*model.parameters(), *model.buffers()]]

    def restore(self) -> None:
        """Put everything back."""
        for module, kind, content in self._modules:
            object.__setattr__(module, "__class__", kind)
            for key in vars(module).keys() - content.keys():
                del vars(module)[key]
            for key, item in content.items():
                _refill(vars(module), key, item)
        with torch.no_grad():
            for tensor, data, gradient in self._tensors:
                tensor.data = data
                tensor.grad = gradient


def _shallow(item: Any) -> Any:
    return item.copy() if isinstance(item, (dict, set)) else item


def _refill(content: dict[str, Any], key: str, item: Any) -> None:
    """Put an entry back; a dictionary keeps its identity, since hooks' handles refer to it."""
    now = content.get(key)
    if isinstance(item, dict) and isinstance(now, dict):
        now.clear()
        now.update(item)
    else:
        content[key] = item


@contextmanager
def untouched(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterator[None]:
    """Restore the model and the optimizer if the block raises; the whole weights are kept until it has ended."""
    before = _Before(model)
    groups = [dict(group) for group in optimizer.param_groups] if optimizer is not None else []
    parameters = [list(group["params"]) for group in groups]
    states = dict(optimizer.state) if optimizer is not None else {}
    try:
        yield
    except BaseException:
        before.restore()
        if optimizer is not None:
            for group, old, held in zip(optimizer.param_groups, groups, parameters, strict=True):
                group.clear()
                group.update(old)
                group["params"] = held
            kept: defaultdict[Any, Any] = defaultdict(dict, states)
            optimizer.state.clear()
            optimizer.state.update(kept)
        raise
