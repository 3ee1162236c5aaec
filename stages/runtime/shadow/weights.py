"""Reloads offloaded parameters for as long as a module that needs them runs.

The hooks are on all modules, not on the model's own: modules with hooks take other kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from stowage.stages.runtime.offload.lender import Lender
from stowage.stages.runtime.shadow.guard import Guard


class Lending:
    """Lends the parameters of one model, for one forward.

    Attributes:
        offloaded: `_cdata` of the storages that stand for offloaded parameters -> the parameters' names.
    """

    def __init__(self, model: nn.Module, offloading: Lender, reads: Mapping[str, frozenset[str]]) -> None:
        """Take the model; `reads` gives for each module the parameters that it reads itself, even another module's."""
        self._offloading = offloading
        self._parameters = offloading.offloaded_parameters()
        self._names = {id(p): name for name, p in self._parameters.items()}
        self.offloaded = {p.untyped_storage()._cdata: name for name, p in self._parameters.items()}
        self._reads: dict[int, set[str]] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            found = self._reads.setdefault(id(module), set())
            found.update(n for n in reads.get(path, ()) if n in self._parameters)
        self._outside = sorted(n for n in reads.get("", ()) if n in self._parameters)
        self._users: dict[str, int] = {}
        self._stand_ins: dict[str, torch.Tensor] = {}

    @contextmanager
    def around(self, guard: Guard) -> Iterator[None]:
        """Give modules that are called inside their parameters."""

        def enter(module: nn.Module, _arguments: Any) -> None:
            for name in self._wanted(module):
                self._fetch(name, guard)

        def leave(module: nn.Module, _arguments: Any, _result: Any) -> None:
            for name in self._wanted(module):
                self._release(name)

        with self._offloading.lending():
            handles = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave)]
            try:
                for name in self._outside:
                    self._fetch(name, guard)
                yield
            finally:
                for handle in handles:
                    handle.remove()
                for name in [*self._stand_ins]:
                    self._users[name] = 1
                    self._release(name)

    def _wanted(self, module: nn.Module) -> list[str]:
        """Return the module's own parameters that are offloaded, and those of others that it reads."""
        own = {self._names[id(p)] for p in module._parameters.values() if id(p) in self._names}
        return sorted(own | self._reads.get(id(module), set()))

    def _fetch(self, name: str, guard: Guard) -> None:
        self._users[name] = self._users.get(name, 0) + 1
        if name in self._stand_ins:
            return
        self._offloading.keep_to_limit()
        like = self._offloading.like(name)
        guard.take(like.numel() * like.element_size())
        parameter = self._parameters[name]
        with torch.utils._python_dispatch._disable_current_modes():
            content = self._offloading.peek(name)
        guard.note(content)
        self._stand_ins[name] = parameter.data
        parameter.data = content

    def _release(self, name: str) -> None:
        left = self._users.get(name, 0) - 1
        self._users[name] = max(left, 0)
        if left <= 0 and name in self._stand_ins:
            self._parameters[name].data = self._stand_ins.pop(name)
