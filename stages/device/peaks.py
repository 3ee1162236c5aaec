"""Tells apart three numbers of a GPU's caching allocator: what it was asked for, has given, and has taken.

Tensors ask for bytes (requested); the allocator rounds up and splits blocks (allocated); the blocks that it has from
the card, pieces between tensors included, are what the card is short of (reserved). A retry is an allocation that
succeeded only after everything cached was given back, with the device idle: a step that has some is near its limit
and slow.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class AllocatorPeaks:
    """Highest values since a `Peaks` object was made.

    Attributes:
        requested_bytes: bytes of tensors.
        allocated_bytes: bytes of the blocks that they lie in.
        reserved_bytes: bytes that the allocator has from the card.
        retries: allocations that first gave everything cached back.
        out_of_memory: allocations that failed.
    """

    requested_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    retries: int
    out_of_memory: int


NOT_COUNTED = AllocatorPeaks(-1, -1, -1, -1, -1)
"""Stands in tables for devices that keep no such numbers."""


class Peaks:
    """Counts the peaks of one device from now on; it has none on devices that keep no such numbers."""

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        self._before = {"num_alloc_retries": 0, "num_ooms": 0}
        if self._device is not None:
            torch.cuda.reset_peak_memory_stats(self._device)
            self._before = self._statistics()

    def _statistics(self) -> dict[str, int]:
        found: dict[str, int] = torch.cuda.memory_stats(self._device)
        return found

    def now(self) -> AllocatorPeaks | None:
        """Return the peaks so far; None on devices that keep no such numbers."""
        return None if self._device is None else peaks_of(self._statistics(), self._before)


def peaks_of(statistics: dict[str, int], before: dict[str, int]) -> AllocatorPeaks:
    """Read peaks from `torch.cuda.memory_stats`; retries and failures are counted since `before`."""
    return AllocatorPeaks(
        requested_bytes=statistics.get("requested_bytes.all.peak", -1),
        allocated_bytes=statistics.get("allocated_bytes.all.peak", -1),
        reserved_bytes=statistics.get("reserved_bytes.all.peak", -1),
        retries=statistics.get("num_alloc_retries", 0) - before.get("num_alloc_retries", 0),
        out_of_memory=statistics.get("num_ooms", 0) - before.get("num_ooms", 0),
    )
