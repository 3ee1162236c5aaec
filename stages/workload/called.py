"""Notes which modules of a model are called, and what needs a gradient there."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


class Called:
    """Notes which modules of a model are called.

    Attributes:
        paths: paths of the modules, in the order of the first call.
        taking: paths of those that were given a tensor which needs a gradient.
        returning: paths of those that returned one.
    """

    def __init__(self, model: nn.Module) -> None:
        self.paths: dict[str, None] = {}
        self.taking: set[str] = set()
        self.returning: set[str] = set()
        self._path_of = {id(module): path for path, module in model.named_modules()}

    def _note(self, module: nn.Module, _arguments: Any) -> None:
        path = self._path_of.get(id(module))
        if path is not None:
            self.paths.setdefault(path)

    def _note_gradients(self, module: nn.Module, arguments: Any, named: Any, output: Any) -> None:
        path = self._path_of.get(id(module))
        if path is None or not torch.is_grad_enabled():
            return
        if _needs_gradient((arguments, named)):
            self.taking.add(path)
        if _needs_gradient(output):
            self.returning.add(path)

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note what is called inside the block; global hooks leave the model's own modules alone."""
        before = nn.modules.module.register_module_forward_pre_hook(self._note)
        after = nn.modules.module.register_module_forward_hook(self._note_gradients, with_kwargs=True)
        try:
            yield
        finally:
            before.remove()
            after.remove()


def _needs_gradient(item: Any) -> bool:
    """Say whether there is a tensor that needs a gradient where FSDP2 looks for one."""
    if isinstance(item, torch.Tensor):
        return item.requires_grad
    if isinstance(item, Mapping):
        return any(map(_needs_gradient, item.values()))
    if isinstance(item, (list, tuple)):
        return any(map(_needs_gradient, item))
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        return any(_needs_gradient(getattr(item, field.name)) for field in dataclasses.fields(item))
    return False
