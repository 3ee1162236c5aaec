"""Counts what the rCache has to load, when it replaces what is called last (Belady)."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush


def loads(calls: Sequence[int], blocks: int) -> int:
    """Return how often a chunk has to be gathered into the rCache during one step.

    Args:
        calls: chunks in the order in which they are called, forward and backward.
        blocks: blocks of the rCache.

    Raises:
        ValueError: there is no block.
    """
    if blocks < 1:
        raise ValueError("the rCache needs at least one block.")
    after: list[int] = [0] * len(calls)
    last: dict[int, int] = {}
    for position in range(len(calls) - 1, -1, -1):
        after[position] = last.get(calls[position], len(calls))
        last[calls[position]] = position
    due: dict[int, int] = {}  # chunk in the rCache -> its next call
    latest: list[tuple[int, int]] = []
    count = 0
    for position, chunk in enumerate(calls):
        if chunk not in due:
            count += 1
            while len(due) >= blocks:
                when, victim = heappop(latest)
                if due.get(victim) == -when:
                    del due[victim]
        due[chunk] = after[position]
        heappush(latest, (-after[position], chunk))
    return count
