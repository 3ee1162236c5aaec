"""Knows which module runs while a step is traced."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn


class Marker:
    """Keeps the phase and the path of the innermost module that runs.

    Attributes:
        stack: paths of the modules that run, outermost first.
        phase: `forward` or `backward`.
    """

    def __init__(self, model: nn.Module) -> None:
        self.stack: list[str] = []
        self.phase = "forward"
        self._paths = {id(module): path for path, module in model.named_modules()}

    def where(self) -> tuple[str, str]:
        """Return phase and path."""
        return self.phase, self.stack[-1] if self.stack else ""

    def _enter(self, module: nn.Module, _arguments: Any) -> None:
        path = self._paths.get(id(module))
        self.stack.append(path if path is not None else (self.stack[-1] if self.stack else ""))

    def _leave(self, _module: nn.Module, _arguments: Any, _result: Any) -> None:
        if self.stack:
            self.stack.pop()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Follow which modules are called inside the block.

        It uses global hooks, because hooks on the model's own modules change which kernels it uses.
        """
        handles = [
            nn.modules.module.register_module_forward_pre_hook(self._enter),
            nn.modules.module.register_module_forward_hook(self._leave),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
