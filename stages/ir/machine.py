"""What is behind the device: the tier below it and the link that joins them."""

from __future__ import annotations

from dataclasses import dataclass

DISK_CHUNK_BYTES = 4 << 20
DISK_THREADS = 2
DISK_STAGING_BYTES = 2 * DISK_THREADS * DISK_CHUNK_BYTES
"""Device memory of a disk tier: each thread of each direction has a buffer for one chunk."""


@dataclass(frozen=True)
class Link:
    """Copies between the device and the tier below it; both directions at once share `duplex_bytes_per_s`.

    Attributes:
        offload_bytes_per_s: down, alone.
        reload_bytes_per_s: up, alone.
        duplex_bytes_per_s: both directions summed when both are busy.
    """

    offload_bytes_per_s: float
    reload_bytes_per_s: float
    duplex_bytes_per_s: float


@dataclass(frozen=True)
class TierState:
    """Where persistent storages are between two iterations: the same at the start and at the end of a plan.

    Attributes:
        below: storages that only the tier below holds.
        reloading: storages on their way to the device; their memory is taken and nobody may read them yet.
        offloading: storages on the device, and on their way down.
        updating: parameters below that the CPU is updating, with their states.
        copied: storages whose copy below is up to date, those of `below` and `reloading` included.
    """

    below: frozenset[int] = frozenset()
    reloading: frozenset[int] = frozenset()
    offloading: frozenset[int] = frozenset()
    copied: frozenset[int] = frozenset()
    updating: frozenset[int] = frozenset()


EVERYTHING_ON_DEVICE = TierState()
