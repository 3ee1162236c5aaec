"""What is behind the device: the tier below it, the disk behind that, and the links that join them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Placement = Literal["host", "disk"]
"""Where what leaves the device lives: pinned memory of the host, or a disk. On a machine without a GPU, whose device
tier is the RAM itself, everything is on the disk."""

DISK_CHUNK_BYTES = 4 << 20
DISK_THREADS = 2
DISK_STAGING_BYTES = 2 * DISK_THREADS * DISK_CHUNK_BYTES
"""RAM that a disk tier needs for itself: each thread of each direction has a buffer for one chunk."""


DISK_ALIGNMENT_BYTES = 512
"""Of memory that direct I/O reaches. Each tensor that comes from a disk may take so much more."""


@dataclass(frozen=True)
class Link:
    """Copies between a tier and the one below it (β in the thesis).

    Attributes:
        offload_bytes_per_s, reload_bytes_per_s: down and up, each alone.
        duplex_bytes_per_s: both together while both are busy; infinite where they do not disturb each other.
    """

    offload_bytes_per_s: float
    reload_bytes_per_s: float
    duplex_bytes_per_s: float = math.inf


@dataclass(frozen=True)
class BehindHost:
    """A disk behind the host. What moves between it and the device passes through buffers in the host.

    Attributes:
        link: between the host and the disk.
        capacity_bytes: room on it.
    """

    link: Link
    capacity_bytes: int


@dataclass(frozen=True)
class TierState:
    """Where persistent storages are between two iterations: the same at the start and at the end of a plan.

    Attributes:
        offloaded: storages that only the lower tier holds.
        reloading: storages on their way to the device; their memory is taken and nobody may read them yet.
        offloading: storages on the device, and on their way down.
        updating: parameters below that the CPU is updating, with their states.
        copied: storages whose copy below is up to date, those of `offloaded` and `reloading` included.
        on_disk: storages, temporary ones too, whose place below is on a disk; it never changes.
    """

    offloaded: frozenset[int] = frozenset()
    reloading: frozenset[int] = frozenset()
    offloading: frozenset[int] = frozenset()
    copied: frozenset[int] = frozenset()
    updating: frozenset[int] = frozenset()
    on_disk: frozenset[int] = frozenset()


EVERYTHING_ON_DEVICE = TierState()
