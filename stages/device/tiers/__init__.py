"""Tiers below the device: where offloaded bytes live and how they move.

base.py       what a tier promises: reserve, offload, reload, wait
layout.py     which bytes of a tensor move
slots.py      what lies in which slot
lanes.py      worker threads: chunks of transfers in order, two streams at once
disk.py       one preallocated file, direct I/O through staging buffers
              (disk_file.py opens it, disk_mover.py moves chunks)
host.py       pinned host memory behind a GPU; cuda_lanes.py: its streams and events; grouping.py: shared buffers
staged.py     host memory and the disk behind it, behind one GPU
null.py       moves nothing in the background and checks the order of verbs
delayed.py    starts the transfers of one stream late, so that a missing wait shows
opening.py    the tier below a kind of device
rates.py      rates of a tier as it is used, alone and beside computing: `python -m stowage.stages.device.tiers`
"""

from __future__ import annotations

from stowage.stages.device.tiers.base import OFFLOAD, RELOAD, HostMemory, Span, Tier, Transfer
from stowage.stages.device.tiers.delayed import DelayedTier
from stowage.stages.device.tiers.disk import DiskTier
from stowage.stages.device.tiers.host import PinnedTier
from stowage.stages.device.tiers.host_and_disk import HostAndDiskTier
from stowage.stages.device.tiers.null import NullTier
from stowage.stages.device.tiers.opening import open_tier

__all__ = [
    "OFFLOAD",
    "RELOAD",
    "DelayedTier",
    "DiskTier",
    "HostAndDiskTier",
    "HostMemory",
    "NullTier",
    "PinnedTier",
    "Span",
    "Tier",
    "Transfer",
    "open_tier",
]
