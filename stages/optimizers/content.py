"""Lists everything that an object holds, in containers and attributes, as paths to tensors and plain values."""

from __future__ import annotations

import types
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from stowage.stages.structure.kinds import attributes

Path = tuple[str, ...]
"""The way to a leaf: attributes, keys and positions as text; a parameter appears in it by its name."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_OPAQUE = (
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    weakref.ReferenceType,
    torch.dtype,
)
SOME_TENSOR = "<a tensor>"
"""Stands in a path for a key that is a tensor without a name."""

_STEERS_NOTHING = {"_opt_called", "_warned_capturable_if_run_uncaptured"}


def leaves_of(item: Any, names: Mapping[int, str]) -> dict[Path, Any]:
    """Return path -> tensor or plain value.

    Args:
        item: any object.
        names: identity of a parameter -> its name, which stands for the parameter wherever it is found.
    """
    return dict(_walk(item, (), names, set()))


def tensors_in(item: Any) -> list[torch.Tensor]:
    """List every tensor that an object holds, at any depth."""
    return [leaf for _, leaf in _walk(item, (), {}, set()) if isinstance(leaf, torch.Tensor)]


def _walk(item: Any, path: Path, names: Mapping[int, str], seen: set[int]) -> Iterator[tuple[Path, Any]]:
    if isinstance(item, torch.Tensor):
        yield path, names.get(id(item), item)
        return
    if isinstance(item, (*_PLAIN, np.generic)):
        yield path, item
        return
    if isinstance(item, np.ndarray):
        yield path, item.tobytes()
        return
    if isinstance(item, torch.Generator):
        yield path, item.get_state()
        return
    if isinstance(item, _OPAQUE) or id(item) in seen:
        return
    seen.add(id(item))
    for name, value in _parts(item, names):
        yield from _walk(value, (*path, name), names, seen)


def _parts(item: Any, names: Mapping[int, str]) -> Iterator[tuple[str, Any]]:
    if isinstance(item, Mapping):
        # In the order of their names: two copies may have been filled in different orders.
        yield from sorted(((_key(k, names), v) for k, v in item.items()), key=lambda pair: pair[0])
        if type(item).__module__ in ("builtins", "collections"):
            return
    elif isinstance(item, (list, tuple)):
        yield from ((str(i), v) for i, v in enumerate(item))
    elif isinstance(item, (set, frozenset)):
        yield from ((_key(k, names), k) for k in sorted(item, key=lambda k: _key(k, names)))
    elif hasattr(item, "__iter__") and hasattr(item, "__len__") and type(item).__module__ == "collections":  # a deque
        yield from ((str(i), v) for i, v in enumerate(item))
    found = dict(attributes(item))
    for name in sorted(found, key=str):
        if name not in _STEERS_NOTHING:
            yield f".{name}", found[name]


def _key(key: Any, names: Mapping[int, str]) -> str:
    if isinstance(key, torch.Tensor):
        return f"<{names[id(key)]}>" if id(key) in names else SOME_TENSOR
    return key if isinstance(key, str) else f"{type(key).__name__} {key}"


def same_leaf(one: Any, other: Any) -> bool:
    """Say whether two leaves are equal bit for bit."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return same_bits(one, other)
    if isinstance(one, float) and isinstance(other, float):
        return one == other or (one != one and other != other)
    return type(one) is type(other) and bool(one == other)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Say whether two tensors are equal bit for bit; a NaN equals itself."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    bits = [t.detach().contiguous().reshape(-1).view(torch.uint8) if t.numel() else t for t in (one, other)]
    return torch.equal(*bits)


def snapshot(leaves: Mapping[Path, Any]) -> dict[Path, Any]:
    """Copy the leaves, so that later steps do not change them."""
    return {p: v.detach().clone() if isinstance(v, torch.Tensor) else v for p, v in leaves.items()}


def named(parameters: Mapping[str, torch.Tensor] | Mapping[str, nn.Parameter]) -> dict[int, str]:
    """Return identity -> name."""
    return {id(p): name for name, p in parameters.items()}
