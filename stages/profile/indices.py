"""Moves made-up indices into the tensors that they index.

Indices that calls of a window compute from made-up numbers may point outside of a tensor. On a GPU such a call ends
the process, and on a CPU not every kernel checks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

_ALONG = frozenset(
    f"{name}{ending}"
    for name in ("index_add", "index_copy", "index_fill", "index_reduce", "scatter", "scatter_add", "scatter_reduce")
    for ending in ("", "_")
) | {"gather", "index_select"}
"""Operators that take a tensor, a dimension and indices into it."""

_EACH = frozenset(["index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"])
"""Operators that take a tensor, and a list with indices into some of its dimensions."""


def _pointing(name: str, args: list[Any]) -> Iterator[tuple[torch.Tensor, int]]:
    """Yield indices among the arguments, each with the number that it must be less than."""
    if name in _ALONG:
        yield args[2], args[0].shape[args[1]] if args[0].dim() else 1
    elif name in _EACH:
        yield from ((index, args[0].shape[d]) for d, index in enumerate(args[1]) if index is not None)
    elif name in ("take", "put", "put_"):
        yield args[1], args[0].numel()
    elif name == "embedding":
        yield args[1], args[0].shape[0]
    elif name == "embedding_dense_backward":
        yield args[1], args[2]
    elif name == "_embedding_bag":
        yield args[1], args[0].shape[0]
        yield args[2], args[1].numel() + 1
    elif name in ("nll_loss_forward", "nll_loss2d_forward"):
        yield args[1], args[0].shape[min(1, args[0].dim() - 1)]
    elif name in ("nll_loss_backward", "nll_loss2d_backward"):
        yield args[2], args[1].shape[min(1, args[1].dim() - 1)]


def moved_inside(target: str, args: list[Any]) -> bool:
    """Set indices of a call that point outside of a tensor to 0; return whether there were any."""
    namespace, name, _ = target.split(".") if target.count(".") == 2 else ("", "", "")
    moved = False
    for index, bound in _pointing(name, args) if namespace == "aten" else ():
        if not isinstance(index, torch.Tensor) or index.dtype == torch.bool or not index.numel():
            continue
        lowest, highest = (int(n) for n in index.aminmax())
        if highest >= bound or (lowest < 0 and lowest not in (-100, -1)):
            index.masked_fill_((index >= bound) | (index < 0), 0)
            moved = True
    return moved
