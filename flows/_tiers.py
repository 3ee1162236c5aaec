"""The tier below the device that `fit` may use: disk on a machine without a GPU, pinned host memory on one with."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from stowage.stages.device.heap import return_freed_memory
from stowage.stages.device.tiers import DiskTier, PinnedTier, Tier
from stowage.stages.device.tiers.disk import CHUNK, THREADS
from stowage.stages.ir.costs import DeviceDescription
from stowage.stages.ir.errors import ParameterError
from stowage.stages.ir.machine import Link
from stowage.stages.settings.sizes import parse_bytes
from stowage.stages.solve import Below

STAGING_BYTES = 2 * THREADS * CHUNK

HEAP_BYTES = 4 << 20
"""Larger blocks go back to the system when they are freed; 1 MiB would cost a small step 1.3 × its time, this 1.07."""


@dataclass(frozen=True)
class LowerTier:
    """What the planner needs to know of the tier, and how to open it once a plan uses it."""

    below: Below
    open: Callable[[], Tier]


def lower_tier(
    device: str,
    target: DeviceDescription,
    *,
    host_budget: str | int | None,
    disk_budget: str | int | None,
    offload_dir: str | Path | None,
) -> LowerTier | None:
    """The tier that the arguments of `fit` allow, or None.

    Raises:
        ParameterError: a budget does not fit the device, or is wrong.
    """
    if device == "cpu":
        if host_budget is not None:
            raise ParameterError(
                "host_budget is for models on a GPU: on the CPU the device tier is the RAM itself, which device_budget "
                "limits; give offload_dir (and disk_budget) to use the disk behind it."
            )
        if offload_dir is None:
            if disk_budget is not None:
                raise ParameterError("disk_budget needs offload_dir: name the folder in which offloaded tensors live.")
            return None
        return _disk(Path(offload_dir), target, disk_budget)
    if host_budget is None:
        return None
    link = Link(target.offload_bytes_per_s, target.reload_bytes_per_s, target.duplex_bytes_per_s)
    return LowerTier(Below(link, parse_bytes(host_budget, "host_budget")), PinnedTier)


def _disk(folder: Path, target: DeviceDescription, disk_budget: str | int | None) -> LowerTier:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise ParameterError(
            f"offload_dir '{folder}' cannot be used: {error.strerror}; choose another folder."
        ) from error
    if not os.access(folder, os.W_OK):
        raise ParameterError(f"offload_dir '{folder}' is not writable; choose another folder.")
    capacity = free if disk_budget is None else min(free, parse_bytes(disk_budget, "disk_budget"))
    link = Link(target.disk_write_bytes_per_s, target.disk_read_bytes_per_s, target.disk_duplex_bytes_per_s)

    def open_tier() -> Tier:
        return_freed_memory(HEAP_BYTES)
        return DiskTier(folder)

    return LowerTier(Below(link, capacity, STAGING_BYTES), open_tier)
