"""Intercepts functions that read a real tensor's memory without a call that PyTorch dispatches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.overrides import TorchFunctionMode

_LOOK: frozenset[Any] = frozenset(
    (torch._C._nn.one_hot, torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__)
)


class WithoutValues(TorchFunctionMode):
    """Gives functions that read memory the fake tensors that stand for the user's real ones.

    They find no values then; otherwise the values of the first step would stay in the plan for ever.
    """

    def __init__(self, stands_for: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._stands_for = stands_for

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _LOOK:
            args, kwargs = pytree.tree_map_only(torch.Tensor, self._stands_for, (args, kwargs or {}))
        return func(*args, **(kwargs or {}))
