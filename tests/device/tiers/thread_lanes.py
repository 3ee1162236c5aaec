"""A GPU's streams and events as threads, on the CPU: host memory as a tier that really runs beside computing."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import torch

from stowage.flows.benchmarks.gpu.lanes import HostLanes, Late
from stowage.stages.device.tiers import DiskTier, HostAndDiskTier, PinnedTier
from tests.device.tiers.moving import PAGE


class ThreadLanes(HostLanes):
    """Host memory begins with a page, as a disk wants it, and holds zeros.

    Attributes:
        allocated: bytes of each buffer that was asked for.
    """

    def __init__(self, late: Collection[Late] = (), seconds: float = 0.0) -> None:
        super().__init__(late, seconds)
        self.allocated: list[int] = []

    def pinned(self, nbytes: int) -> torch.Tensor:
        """See `DeviceLanes`."""
        self.allocated.append(nbytes)
        memory = torch.zeros(nbytes + PAGE, dtype=torch.uint8)
        start = -memory.data_ptr() % PAGE
        return memory[start : start + nbytes]


def host_and_disk(folder: Path, *, chunk_bytes: int = PAGE) -> HostAndDiskTier:
    """Host memory and a disk as on a machine with a GPU, here below the RAM."""
    return HostAndDiskTier(
        PinnedTier(lanes=ThreadLanes()), DiskTier(folder, chunk_bytes=chunk_bytes, lanes=ThreadLanes())
    )
