"""A generated step calls kernels below autograd: it has its own backward, and each call gets there a quarter sooner.

The calls of a trace were recorded below autograd, so they are the same kernels. Code of others that runs inside a step,
such as the optimizer's and hooks, finds PyTorch as it was outside.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch


def below_autograd() -> AbstractContextManager[Any]:
    """Calls inside do not look for gradients."""
    guard: AbstractContextManager[Any] = torch._C._AutoDispatchBelowAutograd()
    return guard


class Outside:
    """How calls were dispatched where this object was made."""

    def __init__(self) -> None:
        self._include: Any = torch._C._dispatch_tls_local_include_set()
        self._exclude: Any = torch._C._dispatch_tls_local_exclude_set()

    def again(self) -> AbstractContextManager[Any]:
        """Calls inside are dispatched so."""
        guard: AbstractContextManager[Any] = torch._C._ForceDispatchKeyGuard(self._include, self._exclude)
        return guard
