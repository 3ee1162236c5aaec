"""Finds nodes that may form a group (thesis 3.3.1 and 3.3.3).

For a node x let a(x) be its closest common ancestor: the last node before x that every path from a source to x passes,
which is x's immediate dominator; the common ancestor of all sources if there is none. All nodes on paths from a(x) to x
are a candidate, with and without either end. "Closest common ancestor" has to be read this way: with an ancestor that
some path goes around, equation 3.2 (nothing in the group but its head has a predecessor outside) does not hold.

No dominator tree is needed. Candidates with more than M^l nodes are discarded at once, so it is enough to walk back
from x, latest node first, until one node is left to visit, which is a(x), or too many were met. That is O(M^l) steps
per node, exact, and independent of the distance to a(x).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from stowage.stages.partition.clusters.level import OUTSIDE, Level


def dominated(level: Level, largest: int) -> Iterator[tuple[int, ...]]:
    """Yield the four candidates of each group, as groups in ascending order; `largest` is M^l.

    Groups have to be numbered topologically.
    """
    predecessors = level.predecessors()
    size = [len(m) for m in level.members]
    for x, before in predecessors.items():
        between: list[int] = []
        if len(before) == 1:
            (head,) = before
        else:
            found = _walk_back(before, predecessors, size, largest)
            if found is None:
                continue
            head, between = found
        inner = sum(size[g] for g in between)
        with_head = head != OUTSIDE
        middle = tuple(between)
        if with_head and inner + size[head] + size[x] <= largest:
            yield (head, *middle, x)
        if middle:
            if inner + size[x] <= largest:
                yield (*middle, x)
            if with_head and inner + size[head] <= largest:
                yield (head, *middle)
            if len(middle) > 1 and inner <= largest:
                yield middle


def _walk_back(
    start: set[int], predecessors: dict[int, set[int]], size: list[int], largest: int
) -> tuple[int, list[int]] | None:
    """Return the dominator, and the groups between it and x in ascending order; None if those have too many nodes."""
    border = set(start)
    between: list[int] = []
    inner = 0
    while len(border) > 1:
        latest = max(border)
        inner += size[latest]
        border.remove(latest)
        border |= predecessors[latest]
        if inner + len(border) - 1 > largest:
            return None
        between.append(latest)
    between.reverse()
    return border.pop(), between


def neighbours(level: Level, largest: int) -> Iterator[tuple[int, ...]]:
    """Yield pairs of groups that follow each other in a topological order.

    Stretches of a topological order are convex, and the union of two that overlap is one again.
    """
    order = level.order()
    for a, b in pairwise(order):
        if len(level.members[a]) + len(level.members[b]) <= largest:
            yield (a, b) if a < b else (b, a)
