"""Describes groups of groups as the rows of a hierarchy, with borders and hashes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from stowage.stages.ir.hierarchy import Cluster, FlowGraph, Hierarchy, wire

Groups = list[list[int]]
"""Members of each group of one level, both ascending in topological order; a group of one is no cluster."""


class _Rows:
    """Collects clusters, inner ones before outer ones."""

    def __init__(self, graph: FlowGraph, power: Sequence[float]) -> None:
        self.graph, self.power = graph, power
        self.clusters: list[Cluster] = []
        self.hierarchy = Hierarchy(graph, self.clusters)
        self.parents: list[int] = []
        # For each value, the members of the current level that read it and do not make it, and the end of the graph.
        self.readers = Counter(v for node in graph.nodes for v in set(node.reads))
        self.readers.update(dict.fromkeys(graph.results, 1))

    def add(self, children: Sequence[int]) -> int:
        """Describe a cluster, and return its number as a member."""
        count, nbytes = len(self.graph.nodes), self.graph.value_bytes
        members = [self.hierarchy.member(m) for m in children]
        inside = Counter(v for m in members for v in set(m.reads))
        made = [v for m in members for v in m.creates]
        outputs = [v for v in made if self.readers[v] > inside[v]]
        wired = wire(members, outputs, nbytes)
        inputs = tuple(wired.values[i] for i in wired.inputs)
        self.readers.subtract({v: inside[v] for v in made})
        self.readers.subtract({v: inside[v] - 1 for v in inputs})
        crossing = sum(nbytes[v] for v in (*inputs, *outputs))
        smaller = [self.clusters[m - count] for m in children if m >= count]
        node_count = len(children) - len(smaller) + sum(c.node_count for c in smaller)
        number = len(self.clusters)
        for c in smaller:
            self.parents[c.cluster] = number
        self.parents.append(-1)
        self.clusters.append(
            Cluster(
                cluster=number,
                parent=-1,
                level=1 + max((c.level for c in smaller), default=0),
                children=tuple(children),
                inputs=inputs,
                outputs=tuple(outputs),
                node_count=node_count,
                interface_bytes=crossing,
                score=crossing * self.power[node_count],
                cluster_hash=wired.content_hash(),
            )
        )
        return count + number


def describe(graph: FlowGraph, order: Sequence[int], levels: Sequence[Groups], power: Sequence[float]) -> Hierarchy:
    """Make the hierarchy.

    Args:
        graph: the forward graph.
        order: its nodes in the order of the first level.
        levels: the groups of each level, as positions in the level before; those of the last one are the children of
            the top.
        power: n^α, indexed by n.
    """
    rows = _Rows(graph, power)
    current = list(order)
    for groups in levels:
        current = [current[group[0]] if len(group) == 1 else rows.add([current[i] for i in group]) for group in groups]
    rows.add(current)
    clusters = [replace(c, parent=parent) for c, parent in zip(rows.clusters, rows.parents)]
    return Hierarchy(graph, clusters)
