"""Describes what is behind the device: the lower tier, the disk behind the host, and the links that join them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Placement = Literal["host", "disk"]
"""Place of an offloaded tensor: pinned memory of the host, or a disk.

On a machine without a GPU, whose device tier is the RAM itself, everything is on the disk.
"""

DISK_CHUNK_BYTES = 4 << 20
DISK_THREADS = 2
DISK_STAGING_BYTES = 2 * DISK_THREADS * DISK_CHUNK_BYTES
"""RAM that a disk tier needs for itself: each thread of each direction has a buffer for one chunk."""


DISK_ALIGNMENT_BYTES = 512
"""Alignment of memory that direct I/O needs; each tensor reloaded from a disk may take that much more."""


@dataclass(frozen=True)
class Link:
    """Copies between a tier and the next lower one (β in the thesis).

    Attributes:
        offload_bytes_per_s, reload_bytes_per_s: rate of each direction, alone.
        duplex_bytes_per_s: both together while both are busy; infinite where they do not slow each other down.
        carries_collectives: collectives among ranks pass over it too, and get half of it while copies want it.
    """

    offload_bytes_per_s: float
    reload_bytes_per_s: float
    duplex_bytes_per_s: float = math.inf
    carries_collectives: bool = False


@dataclass(frozen=True)
class BehindHost:
    """A disk behind the host; transfers between it and the device pass through buffers in the host.

    Attributes:
        link: between the host and the disk.
        capacity_bytes: room on the disk.
    """

    link: Link
    capacity_bytes: int


@dataclass(frozen=True)
class TierState:
    """The places of persistent storages between two iterations: equal at the start and at the end of a plan.

    Attributes:
        offloaded: storages that are in the lower tier alone.
        reloading: storages on their way to the device; their memory is taken and nothing may read them yet.
        offloading: storages on the device that are being copied to the lower tier.
        updating: offloaded parameters that the CPU is updating, with their states.
        copied: storages whose copy in the lower tier is up to date, those of `offloaded` and `reloading` included.
        on_disk: storages, temporary ones too, whose placement is the disk; it never changes.
    """

    offloaded: frozenset[int] = frozenset()
    reloading: frozenset[int] = frozenset()
    offloading: frozenset[int] = frozenset()
    copied: frozenset[int] = frozenset()
    updating: frozenset[int] = frozenset()
    on_disk: frozenset[int] = frozenset()


EVERYTHING_ON_DEVICE = TierState()
