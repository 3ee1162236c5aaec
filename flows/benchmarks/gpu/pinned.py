"""Counts the time that pinning host memory takes: tens of seconds for tens of GB, before anything is trained."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch

from stowage.stages.device.tiers.cuda_lanes import CudaLanes
from stowage.stages.ir.errors import size_text

LARGE_BYTES = 1 << 30
"""Bytes of pinned memory after which progress is printed."""


class Pinned:
    """Counts seconds and bytes of pinning.

    Attributes:
        seconds: seconds that pinning has taken so far.
        nbytes: bytes pinned so far, as asked for; the allocator takes the next power of two.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.nbytes = 0
        self._told = 0

    def empty(self, nbytes: int) -> torch.Tensor:
        """Return flat bytes of pinned memory."""
        return self.count(nbytes, partial(torch.empty, nbytes, dtype=torch.uint8, pin_memory=True))

    def count(self, nbytes: int, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return what `make` returns, counting its time and `nbytes` as pinned."""
        began = time.perf_counter()
        made = make()
        self.seconds += time.perf_counter() - began
        self.nbytes += nbytes
        if self.nbytes - self._told >= LARGE_BYTES:
            self._told = self.nbytes
            print(f"pinned {size_text(self.nbytes)} in {self.seconds:.1f} s", flush=True)
        return made


class CountedLanes(CudaLanes):
    """Lanes of a GPU that add what pinning takes to `pinned_so_far`."""

    def __init__(self, device: torch.device, pinned_so_far: Pinned) -> None:
        super().__init__(device)
        self._pinned_so_far = pinned_so_far

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Return pinned memory, and count it."""
        return self._pinned_so_far.count(nbytes, partial(super().pinned, nbytes))
