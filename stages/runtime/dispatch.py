"""Lets a generated step call kernels below autograd: it has its own backward, and dispatch is a quarter faster.

The calls of a trace were recorded below autograd and below PyTorch's function modes (a default device is one), so they
are the same kernels with the same arguments. Code of others that runs inside a step, such as the optimizer's and
hooks, finds PyTorch as it was outside.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

_C: Any = torch._C


@contextmanager
def below_autograd() -> Iterator[None]:
    """Run calls inside without autograd, and without modes that change what functions of `torch` do."""
    modes = [_C._pop_torch_function_stack() for _ in range(_C._len_torch_function_stack())]
    try:
        with _C._AutoDispatchBelowAutograd():
            yield
    finally:
        for mode in reversed(modes):
            _C._push_on_torch_function_stack(mode)


class OutsideDispatch:
    """Remembers how calls were dispatched where this object was made."""

    def __init__(self) -> None:
        self._include: Any = _C._dispatch_tls_local_include_set()
        self._exclude: Any = _C._dispatch_tls_local_exclude_set()
        self._modes = [_C._get_function_stack_at(i) for i in range(_C._len_torch_function_stack())]

    def again(self) -> AbstractContextManager[Any]:
        """Dispatch calls inside as they were dispatched where this object was made."""
        guard: AbstractContextManager[Any] = _C._ForceDispatchKeyGuard(self._include, self._exclude)
        return _with_modes(guard, self._modes) if self._modes else guard


@contextmanager
def _with_modes(guard: AbstractContextManager[Any], modes: list[Any]) -> Iterator[None]:
    there = _C._len_torch_function_stack()  # empty inside of a step; elsewhere it already has all of them
    added = modes if not there else []
    with guard:
        for mode in added:
            _C._push_on_torch_function_stack(mode)
        try:
            yield
        finally:
            for _ in added:
                _C._pop_torch_function_stack()
