"""Freezes parameters while plain PyTorch runs beside a plan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch


@contextmanager
def requiring_no_gradients(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Let some parameters require no gradients inside the block, as plain PyTorch freezes them."""
    changed = [parameter for parameter in parameters if parameter.requires_grad]
    try:
        for parameter in changed:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in changed:
            parameter.requires_grad_(True)
