"""Plain PyTorch that keeps the largest tenth of what a frozen layer normalisation reads: the reference for `top10`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from tests.rewrite.packed_by_hooks import REFERENCE


def norms_of(model: nn.Module) -> list[nn.LayerNorm]:
    """The layer normalisations of a model."""
    return [module for module in model.modules() if isinstance(module, nn.LayerNorm)]


@contextmanager
def pruned(model: nn.Module) -> Iterator[list[nn.LayerNorm]]:
    """Inside, layer normalisations whose weights require no gradient save the largest tenth of what they read."""
    found: list[nn.LayerNorm] = []

    def forward(norm: nn.LayerNorm, whole: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        if norm.weight.requires_grad or not x.requires_grad:
            return whole(x)
        found.append(norm)

        def pack(saved: torch.Tensor) -> torch.Tensor:
            own = saved.data_ptr() == x.data_ptr() and saved.shape == x.shape
            return REFERENCE["top10"](saved.detach()) if own else saved.detach()

        with saved_tensors_hooks(pack, lambda kept: kept):
            return whole(x)

    norms = norms_of(model)
    for norm in norms:
        norm.forward = partial(forward, norm, norm.forward)  # type: ignore[method-assign]
    try:
        yield found
    finally:
        for norm in norms:
            del norm.forward
