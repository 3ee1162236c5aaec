"""Groups tensors into shared allocations of pinned memory, which come in powers of two (thesis 4.7.2).

The thesis leaves the heuristic open. Here: as many allocations of one large size as the tensors fill, each filled by a
knapsack, largest tensors first; what is left fills ever smaller powers of two, or one that takes all of it. Of the
possible large sizes the one with the least waste is taken. Many tensors that are small beside the total waste next to
nothing; a few tensors can waste up to as much as they have, as a single one does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

ALIGNMENT = 64
"""Slices start at multiples of a cache line, which vectorised code and direct I/O prefer."""

_UNITS = 8192
"""An allocation is filled in steps of this fraction of it."""


@dataclass(frozen=True)
class HostAllocation:
    """One allocation and the tensors in it.

    Attributes:
        nbytes: a power of two.
        names, offsets: tensors and where each starts.
    """

    nbytes: int
    names: tuple[str, ...]
    offsets: tuple[int, ...]


def group_allocations(sizes: Mapping[str, int], *, largest_bytes: int = 1 << 32) -> tuple[HostAllocation, ...]:
    """Return allocations with room for all tensors, each tensor in one piece.

    Args:
        sizes: bytes of each tensor; empty ones get a place too.
        largest_bytes: no allocation is larger, unless a tensor is. A power of two.
    """
    by_size: dict[int, list[str]] = {}
    for name, nbytes in sorted(sizes.items(), key=lambda item: (-item[1], item[0])):
        by_size.setdefault(-(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT, []).append(name)
    counts = {size: len(names) for size, names in by_size.items()}
    best: list[_Filling] = []
    capacity = max(largest_bytes, power_of_two(max(counts, default=1)))
    smallest = power_of_two(max(counts, default=1))
    while capacity >= smallest:
        found = _all_into(counts, capacity)
        if not best or sum(c for c, _ in found) < sum(c for c, _ in best):
            best = found
        capacity //= 2
    return tuple(_lay_out(capacity, filling, by_size) for capacity, filling in best)


def wasted_bytes(allocations: tuple[HostAllocation, ...], sizes: Mapping[str, int]) -> int:
    """Return the bytes that the allocations take beyond those of the tensors."""
    return sum(a.nbytes for a in allocations) - sum(sizes.values())


def power_of_two(nbytes: int) -> int:
    """Return the smallest power of two that is at least `nbytes`."""
    return 1 << max(0, nbytes - 1).bit_length()


_Filling = tuple[int, dict[int, int]]
"""Capacity, and size -> how many tensors of it."""


def _all_into(counts: dict[int, int], capacity: int) -> list[_Filling]:
    """Fill allocations of one size, then place the rest."""
    rest, found = dict(counts), list[_Filling]()
    while _total(rest) > capacity:
        filling = _fill(rest, capacity)
        found.append((capacity, filling))
        rest = _without(rest, filling)
    return found + _last(rest)


def _last(counts: dict[int, int]) -> list[_Filling]:
    """Place the last tensors: in one allocation, or in a smaller one that is filled and another for what is left."""
    total = _total(counts)
    if not counts:
        return []
    together = power_of_two(max(total, 1))
    half = together // 2
    if half < max(counts) or total == together:
        return [(together, dict(counts))]
    filling = _fill(counts, half)
    apart = [(half, filling), *_last(_without(counts, filling))]
    return apart if sum(c for c, _ in apart) < together else [(together, dict(counts))]


def _total(counts: dict[int, int]) -> int:
    return sum(size * count for size, count in counts.items())


def _without(counts: dict[int, int], filling: dict[int, int]) -> dict[int, int]:
    rest = {size: count - filling.get(size, 0) for size, count in counts.items()}
    return {size: count for size, count in rest.items() if count}


def _fill(counts: dict[int, int], capacity: int) -> dict[int, int]:
    """Choose tensors whose total is at most `capacity` and nearly that; sizes round up to 1/8192 of it."""
    unit = max(1, capacity // _UNITS)
    room = capacity // unit
    reached = np.zeros(room + 1, dtype=bool)
    reached[0] = True
    by = np.full(room + 1, -1)
    chunks: list[tuple[int, int, int]] = []
    for size in sorted(counts, reverse=True):
        left, chunk = min(counts[size], capacity // size), 1
        while left > 0 and not reached[room]:
            taken = min(chunk, left)
            width = -(-size * taken // unit)
            if 0 < width <= room:
                new = np.flatnonzero(reached[:-width] & ~reached[width:]) + width
                reached[new], by[new] = True, len(chunks)
                chunks.append((size, taken, width))
            left, chunk = left - taken, chunk * 2
    at = int(np.flatnonzero(reached)[-1])
    found: dict[int, int] = {}
    while at:
        size, taken, width = chunks[by[at]]
        found[size] = found.get(size, 0) + taken
        at -= width
    return found


def _lay_out(capacity: int, filling: dict[int, int], by_size: dict[int, list[str]]) -> HostAllocation:
    names: list[str] = []
    offsets: list[int] = []
    at = 0
    for size, count in filling.items():
        for _ in range(count):
            names.append(by_size[size].pop(0))
            offsets.append(at)
            at += size
    return HostAllocation(capacity, tuple(names), tuple(offsets))
