"""Opens the lower tier of a kind of device, for a plan that offloads."""

from __future__ import annotations

from pathlib import Path

import torch

from stowage.stages.device.heap import return_freed_memory
from stowage.stages.device.tiers.base import Tier
from stowage.stages.device.tiers.cuda_lanes import CudaLanes
from stowage.stages.device.tiers.disk import DiskTier
from stowage.stages.device.tiers.host import PinnedTier
from stowage.stages.device.tiers.host_and_disk import HostAndDiskTier
from stowage.stages.ir.errors import PlanMismatchError

HEAP_BYTES = 32 << 20
"""Bytes: larger blocks go back to the system when they are freed.

Others stay in the heap, as far as `ResidentLimit` admits: with 4 MiB here, and no such limit, the kernel zeroes pages
for a third of the time of a step that offloads.
"""


def open_tier(device: torch.device | str, folder: str | Path | None) -> Tier:
    """Open the lower tier of a device; `cuda` is the current GPU.

    For a GPU it is pinned host memory, with a file in `folder` behind it if that is given; for `cpu` it is the file
    alone, and freed memory goes back to the system.

    Raises:
        StowageError: the folder cannot be used, or there is none.
    """
    device = torch.device(device)
    if device.type != "cpu":
        host = PinnedTier(device)
        return host if folder is None else HostAndDiskTier(host, DiskTier(folder, lanes=CudaLanes(device)))
    if folder is None:
        raise PlanMismatchError("The plan offloads to disk, and offload_dir is empty: name the folder, or plan again.")
    return_freed_memory(HEAP_BYTES)
    return DiskTier(folder)
