"""Moves nodes that depend on no input of the graph to their first reader, before the first level.

A random dropout mask, a cast of a weight or a table of positions is a source of its own. Each would give its reader the
common ancestor of all sources for a(x), and leave it without a small candidate (thesis 3.3.1); in the chain of blocks
the same nodes hide cuts. So they are placed right before their first reader and start in one group with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from stowage.stages.ir.hierarchy import FlowGraph

LONGEST_SEARCH = 512
"""Number of groups visited before an edge without a value is taken to matter."""


@dataclass(frozen=True)
class Start:
    """The start of the first level.

    Attributes:
        order: nodes in the topological order to use.
        units: positions in `order` of nodes that start as one group, each contiguous, two nodes at least.
        after: edges without a value, between node numbers, that values do not imply.
    """

    order: list[int]
    units: list[tuple[int, ...]]
    after: list[tuple[int, int]]


def as_it_is(graph: FlowGraph) -> Start:
    """Leave every node by itself, in the given order."""
    own = list(range(len(graph.nodes)))
    return Start(own, [], _not_implied(graph, own))


def with_first_readers(graph: FlowGraph, largest: int) -> Start:
    """Move nodes apart to their first readers; units have at most half of `largest` nodes, so that they can grow.

    The place of a node apart is the smallest place of what must follow it, so places never fall along an edge: groups
    of equal place are convex and ordered, whichever nodes are moved. A node that does not fit its unit stays a group by
    itself, with all that it needs.
    """
    place = _places(graph)
    order = sorted(range(len(place)), key=lambda n: (place[n], n))
    position = {n: i for i, n in enumerate(order)}
    units: list[tuple[int, ...]] = []
    unit_of = list(range(len(place)))
    for reader, members in groupby(order, key=place.__getitem__):
        unit = list(members)[-max(largest // 2, 1) :]
        if len(unit) > 1:
            units.append(tuple(position[n] for n in unit))
            for n in unit:
                unit_of[n] = reader
    return Start(order, units, _not_implied(graph, unit_of))


def _places(graph: FlowGraph) -> list[int]:
    """Return the node whose place each node shares: its own, or its first reader's."""
    maker = {v: i for i, node in enumerate(graph.nodes) for v in node.creates}
    place = list(range(len(graph.nodes)))
    apart: list[bool] = []
    for node in graph.nodes:
        apart.append(not node.enters and all(v in maker and apart[maker[v]] for v in node.reads))
    if all(apart):
        return place  # nothing enters the graph, so all sources are equal
    first = [len(place)] * len(place)
    for number in range(len(place) - 1, -1, -1):
        if apart[number] and first[number] < len(place):
            place[number] = first[number]
        node = graph.nodes[number]
        for before in [*(maker[v] for v in node.reads if v in maker), *node.after]:
            first[before] = min(first[before], place[number])
    return place


def _not_implied(graph: FlowGraph, unit_of: Sequence[int]) -> list[tuple[int, int]]:
    """Return edges without a value between units that no path of values between units implies.

    The order of random draws nearly always follows from the values. Paths longer than `LONGEST_SEARCH` are not found;
    the edge is then kept, which is right, only stricter.
    """
    pairs = [(a, b) for b, node in enumerate(graph.nodes) for a in node.after]
    if not pairs:
        return []
    maker = {v: i for i, node in enumerate(graph.nodes) for v in node.creates}
    members: dict[int, list[int]] = {}
    for number, unit in enumerate(unit_of):
        members.setdefault(unit, []).append(number)
    kept: list[tuple[int, int]] = []
    for a, b in pairs:
        goal, start = unit_of[a], unit_of[b]
        seen = {start}
        stack = [start]
        while stack and goal not in seen and len(seen) < LONGEST_SEARCH:
            read = {v for number in members[stack.pop()] for v in graph.nodes[number].reads}
            found = {unit_of[maker[v]] for v in read if v in maker} - seen
            seen |= found
            stack += found
        if goal not in seen:
            kept.append((a, b))
    return kept
