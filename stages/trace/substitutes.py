"""Fake kernels of our own, for operators whose real kernel takes more than PyTorch's fake one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._ops import OpOverload

SUBSTITUTES: dict[OpOverload, Callable[..., Any]] = {}
"""Operator -> what it returns, made with `torch.empty_strided` and the like under the active fake mode."""
