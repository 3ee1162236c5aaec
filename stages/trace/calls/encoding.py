"""Writes the arguments of a call as JSON; `ir.arguments` reads them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from stowage.stages.ir.errors import TraceError


def encode(args: Sequence[Any], kwargs: Mapping[str, Any], tensor: Callable[[Any], Any]) -> str:
    """Return the arguments as JSON; `tensor` returns what stands for a tensor, and None for anything else.

    Raises:
        TraceError: an argument cannot be stored.
    """

    def leaf(item: Any) -> Any:
        if isinstance(item, (bool, str)) or item is None:
            return item
        if isinstance(item, int):
            return int(item)
        if isinstance(item, float):
            return item if math.isfinite(item) else {"float": str(item)}
        if isinstance(item, (list, tuple)):
            return [leaf(element) for element in item]
        if (found := tensor(item)) is not None:
            return found
        if isinstance(item, complex):
            return {"complex": [item.real, item.imag]}
        if isinstance(item, torch.device):
            return {"device": str(item)}
        for kind in (torch.dtype, torch.layout, torch.memory_format):
            if isinstance(item, kind):
                return {kind.__name__: str(item).removeprefix("torch.")}
        if isinstance(item, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            raise TraceError("A shape of the step depends on data, which cannot be planned.")
        raise TraceError(f"An operator takes an argument of type {type(item).__name__}, which cannot be stored.")

    content = {"args": [leaf(a) for a in args], "kwargs": {k: leaf(a) for k, a in kwargs.items()}}
    return json.dumps(content, separators=(",", ":"))
