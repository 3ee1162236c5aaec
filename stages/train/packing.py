"""Packs nested containers with tensors as JSON: tensors become references into the file that has their content."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from stowage.stages.ir.errors import ParameterError

Tensors = dict[str, torch.Tensor]


def pack(item: Any, prefix: str, tensors: Tensors) -> Any:
    """Replace tensors in nested containers by references, so that the rest is JSON.

    Raises:
        ParameterError: it holds an object that is neither.
    """
    if isinstance(item, torch.Tensor):
        tensors[prefix] = item
        return {"tensor": prefix}
    if isinstance(item, dict):
        return {"dict": [[k, pack(v, f"{prefix}/{k}", tensors)] for k, v in item.items()]}
    for kind in (list, tuple):  # and subclasses of them
        if isinstance(item, kind):
            return {kind.__name__: [pack(v, f"{prefix}/{i}", tensors) for i, v in enumerate(item)]}
    if item is None or isinstance(item, (bool, int, float, str)):
        return item
    raise ParameterError(
        f"A checkpoint holds tensors, numbers, strings, lists and dictionaries, but {prefix.replace('/', ' → ')} is a "
        f"{type(item).__name__}: save the model alone (`save_model`), or keep that state in an optimizer that gives "
        "plain values in its `state_dict()`."
    )


def unpack(item: Any, read: Callable[[str], torch.Tensor]) -> Any:
    """Return what `pack` was given; `read` gives the tensor of a reference.

    Raises:
        ValueError, KeyError, TypeError: `pack` has not written this.
    """
    if isinstance(item, dict):
        ((kind, content),) = item.items()
        match kind, content:
            case "tensor", str():
                return read(content)
            case "dict", list():
                return {tuple(k) if isinstance(k, list) else k: unpack(v, read) for k, v in content}
            case (("list" | "tuple"), list()):
                return {"list": list, "tuple": tuple}[kind](unpack(v, read) for v in content)
        raise ValueError(f"there is no {kind}")
    if item is None or isinstance(item, (bool, int, float, str)):
        return item
    raise ValueError(f"a {type(item).__name__} stands for nothing")
