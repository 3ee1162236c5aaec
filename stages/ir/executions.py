"""Drops executions whose results nobody reads, from any sequence in which nodes may run several times."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

Touched = Callable[[int], Iterable[int]]
"""Memory that a node creates, or reads, by the node's number."""


def first_runs(nodes: Sequence[int]) -> list[bool]:
    """Say of each execution whether it is the first of its node."""
    first = dict(zip(reversed(nodes), range(len(nodes) - 1, -1, -1)))
    return [first[node] == position for position, node in enumerate(nodes)]


def needed_runs(
    nodes: Sequence[int], stays: Sequence[bool], wanted: set[int], creates: Touched, reads: Touched
) -> list[int]:
    """Return the positions of the executions that stay in any case, or make what is read before it is made again.

    Args:
        nodes: the node of each execution, in the order in which they run.
        stays: whether an execution stays though nobody reads its results.
        wanted: what is read after the last execution; afterwards, what is read of before the first.
        creates: what a node creates.
        reads: what a node reads, of what may be made again.
    """
    kept: list[int] = []
    for position in range(len(nodes) - 1, -1, -1):
        node = nodes[position]
        made = creates(node)
        if stays[position] or not wanted.isdisjoint(made):
            kept.append(position)
            wanted.difference_update(made)
            wanted.update(reads(node))
    kept.reverse()
    return kept
