"""One level of H-Partition: a graph whose nodes are merged into groups, and the values that cross their borders.

Everything is kept per group: the maker of a value, the number of groups that read it. So the score of a union of groups
costs what their borders cost, whatever lies inside.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from stowage.stages.ir.hierarchy import FlowGraph

OUTSIDE = -1
"""Maker of a value that enters the graph: the common ancestor of all sources."""


@dataclass(frozen=True)
class Values:
    """The values of the graph, with the facts that change as groups form; one object for all levels.

    Attributes:
        nbytes: bytes of each value.
        owner: the group that makes each value, `OUTSIDE` if none.
        readers: number of groups that read each value and are not its owner, plus one if it is needed at the end.
    """

    nbytes: Sequence[int]
    owner: list[int]
    readers: list[int]


class Level:
    """Nodes of one level, and the groups they are in; a group is named by the first of its nodes.

    Attributes:
        members: nodes of each group, ascending; empty for nodes that are not the first of a group.
        weight: number of nodes of the forward graph inside each group.
        reads: values that each group reads from outside.
        makes: values that each group makes for others.
        after: edges between nodes without a value.
        group_of: group of each node.
        count: number of groups.
    """

    def __init__(
        self,
        weight: list[int],
        reads: list[list[int]],
        makes: list[list[int]],
        after: list[tuple[int, int]],
        values: Values,
    ) -> None:
        self.members: list[list[int]] = [[i] for i in range(len(weight))]
        self.weight, self.reads, self.makes, self.after, self.values = weight, reads, makes, after, values
        self.group_of = list(range(len(weight)))
        self.count = len(weight)

    def groups(self) -> Iterable[int]:
        """Return all groups, ascending."""
        return (g for g, members in enumerate(self.members) if members)

    def interface_bytes(self, groups: Sequence[int]) -> int:
        """Return the sum in equation 3.1 for the union of groups: bytes of values that cross its border, each once."""
        values = self.values
        nbytes, owner, readers = values.nbytes, values.owner, values.readers
        seen: dict[int, int] = {}
        for group in groups:
            for v in self.reads[group]:
                seen[v] = seen.get(v, 0) + 1
        total = 0
        for v in seen:
            if owner[v] not in groups:
                total += nbytes[v]
        for group in groups:
            for v in self.makes[group]:
                if seen.get(v, 0) < readers[v]:
                    total += nbytes[v]
        return total

    def merge(self, groups: Sequence[int]) -> None:
        """Merge several groups, given ascending, into one."""
        owner, readers = self.values.owner, self.values.readers
        first = groups[0]
        seen: dict[int, int] = {}
        for group in groups:
            for v in self.reads[group]:
                seen[v] = seen.get(v, 0) + 1
        makes: list[int] = []
        for group in groups:
            for v in self.makes[group]:
                readers[v] -= seen.get(v, 0)
                if readers[v]:
                    owner[v] = first
                    makes.append(v)
        mine = frozenset(groups)
        reads: list[int] = []
        for v, times in seen.items():
            if owner[v] not in mine:
                readers[v] -= times - 1
                reads.append(v)
        self.reads[first], self.makes[first] = reads, makes
        for group in groups[1:]:
            self.members[first] += self.members[group]
            self.weight[first] += self.weight[group]
            self.members[group], self.reads[group], self.makes[group] = [], [], []
        self.members[first].sort()
        for node in self.members[first]:
            self.group_of[node] = first
        self.count -= len(groups) - 1

    def predecessors(self) -> dict[int, set[int]]:
        """Return the groups that must run before each group, `OUTSIDE` for those that need none."""
        owner = self.values.owner
        found = {g: {owner[v] for v in self.reads[g]} for g in self.groups()}
        for before, node in self.after:
            a, b = self.group_of[before], self.group_of[node]
            if a != b:
                found[b].add(a)
        for before_it in found.values():
            if len(before_it) > 1:
                before_it.discard(OUTSIDE)
            elif not before_it:
                before_it.add(OUTSIDE)
        return found

    def order(self) -> list[int]:
        """Return the groups in the topological order that stays closest to that of the nodes."""
        return topological(self.predecessors())

    def contract(self) -> tuple[Level, list[list[int]]]:
        """Return the next level, made of this level's groups, and the nodes of each; this level is unusable after."""
        order = self.order()
        position = {g: i for i, g in enumerate(order)}
        owner = self.values.owner
        for group in order:
            for v in self.makes[group]:
                owner[v] = position[group]
        pairs = {(position[self.group_of[a]], position[self.group_of[b]]) for a, b in self.after}
        level = Level(
            [self.weight[g] for g in order],
            [self.reads[g] for g in order],
            [self.makes[g] for g in order],
            sorted((a, b) for a, b in pairs if a != b),
            self.values,
        )
        return level, [self.members[g] for g in order]


def topological(predecessors: dict[int, set[int]]) -> list[int]:
    """Return Kahn's topological order, the smallest number first."""
    waiting: dict[int, int] = {}
    next_of: dict[int, list[int]] = {}
    for node, before in predecessors.items():
        waiting[node] = len(before)
        for other in before:
            next_of.setdefault(other, []).append(node)
    ready: list[int] = []

    def done(node: int) -> None:
        for other in next_of.get(node, ()):
            waiting[other] -= 1
            if not waiting[other]:
                heappush(ready, other)

    done(OUTSIDE)
    heapify(ready)
    order: list[int] = []
    while ready:
        node = heappop(ready)
        order.append(node)
        done(node)
    return order


def first_level(graph: FlowGraph, order: Sequence[int], after: Iterable[tuple[int, int]]) -> Level:
    """Make the first level, the forward graph with its nodes renumbered by `order`; `after` has old numbers."""
    number = [0] * len(order)
    for new, old in enumerate(order):
        number[old] = new
    values = Values(graph.value_bytes, [OUTSIDE] * len(graph.value_bytes), [0] * len(graph.value_bytes))
    reads = [list(dict.fromkeys(graph.nodes[old].reads)) for old in order]
    for some in reads:
        for v in some:
            values.readers[v] += 1
    for v in dict.fromkeys(graph.results):
        values.readers[v] += 1
    makes: list[list[int]] = []
    for new, old in enumerate(order):
        makes.append([v for v in graph.nodes[old].creates if values.readers[v]])
        for v in makes[-1]:
            values.owner[v] = new
    edges = [(number[a], number[b]) for a, b in after]
    return Level([1] * len(order), reads, makes, edges, values)
