"""Plain PyTorch that keeps the largest tenth of what a frozen layer normalisation reads: the reference for `top10`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from stowage.stages.ir.trace import TraceTables
from stowage.stages.ir.variant import VariantName
from stowage.stages.rewrite.lossy import CODECS, compressed_sites
from tests.rewrite.packed_by_hooks import REFERENCE

FROZEN = "top10_frozen"
"""The rewrite's name."""


def norms_of(trace: TraceTables, variant: str) -> set[str]:
    """Paths of the layer normalisations for which a variant keeps codes while they are frozen."""
    found = compressed_sites(trace, CODECS[FROZEN])
    sites = next((sites for name, sites in VariantName.of(variant).parts if name == FROZEN), ())
    chosen = found if sites is None else [found[site] for site in sites]
    return {trace.calls[reader].module for saved in chosen for reader in saved.readers}


@contextmanager
def pruned(model: nn.Module, paths: Collection[str]) -> Iterator[list[str]]:
    """Inside, some layer normalisations save the largest tenth of what they read where their weight needs no gradient.

    Yields:
        Paths of those that have done so.
    """
    found: list[str] = []
    norms = {path: module for path, module in model.named_modules() if path in paths}

    def forward(path: str, whole: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        if norms[path].weight.requires_grad or not x.requires_grad:
            return whole(x)
        found.append(path)

        def pack(saved: torch.Tensor) -> torch.Tensor:
            own = saved.data_ptr() == x.data_ptr() and saved.shape == x.shape
            return REFERENCE["top10"](saved.detach()) if own else saved.detach()

        with saved_tensors_hooks(pack, lambda kept: kept):
            return whole(x)

    for path, norm in norms.items():
        norm.forward = partial(forward, path, norm.forward)  # type: ignore[method-assign]
    try:
        yield found
    finally:
        for norm in norms.values():
            del norm.forward
