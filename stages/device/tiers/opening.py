"""The tier below a kind of device, opened for a plan that offloads."""

from __future__ import annotations

from pathlib import Path

from stowage.stages.device.heap import return_freed_memory
from stowage.stages.device.tiers.base import Tier
from stowage.stages.device.tiers.disk import DiskTier
from stowage.stages.device.tiers.host import PinnedTier
from stowage.stages.ir.errors import PlanMismatchError

HEAP_BYTES = 4 << 20
"""Larger blocks go back to the system when they are freed; 1 MiB would cost a small step 1.3 × its time, this 1.07."""


def open_tier(kind: str, folder: str | Path | None) -> Tier:
    """Pinned host memory below `cuda`; below `cpu` a file in `folder`, and freed memory goes back to the system.

    Raises:
        StowageError: the folder cannot be used, or there is none.
    """
    if kind != "cpu":
        return PinnedTier()
    if folder is None:
        raise PlanMismatchError("The plan offloads to disk, and offload_dir is empty: name the folder, or plan again.")
    return_freed_memory(HEAP_BYTES)
    return DiskTier(folder)
