"""Packs parameters into chunks of one length, in the order in which forward calls them (A.2)."""

from __future__ import annotations

from collections.abc import Sequence


def pack(elements: Sequence[int], length: int) -> list[list[int]]:
    """Return the positions of the parameters of each chunk.

    A parameter that does not fit into what is left of the current chunk closes it.

    Args:
        elements: size of each parameter, in the order of forward.
        length: elements of a chunk.

    Raises:
        ValueError: a parameter is longer than a chunk.
    """
    chunks: list[list[int]] = []
    left = 0
    for position, size in enumerate(elements):
        if size > length:
            raise ValueError(f"parameter {position} has {size} elements and a chunk {length}: take longer chunks.")
        if size > left:
            chunks.append([])
            left = length
        chunks[-1].append(position)
        left -= size
    return chunks


def lengths(elements: Sequence[int], *, least: int = 1 << 24, steps: int = 32) -> list[int]:
    """List the lengths that are tried: from the first doubling of `least` that holds every parameter, to 3 times that.

    Args:
        elements: size of each parameter.
        least: the shortest length.
        steps: lengths that are tried for each time that the shortest one goes into the longest.
    """
    first = least
    while first < max(elements):
        first *= 2
    return [first + first * k // steps for k in range(2 * steps + 1)]
