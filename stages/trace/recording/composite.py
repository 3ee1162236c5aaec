"""Runs operators that PyTorch composes of others."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload

_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


def composed(func: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Run an operator as eager composes it; `NotImplemented` where it does not.

    `OpOverload.decompose` prefers a composition in Python, of which some, such as those of interpolation and GRU, call
    other kernels than eager's in C++ and have other bits.
    """
    name = func.name()  # type: ignore[no-untyped-call]
    if torch._C._dispatch_has_kernel_for_dispatch_key(name, _COMPOSITE):
        return func._op_dk(_COMPOSITE, *args, **kwargs)
    return func.decompose(*args, **kwargs)
