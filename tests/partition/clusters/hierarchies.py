"""What every hierarchy of clusters promises, judged from the definitions alone."""

from __future__ import annotations

from collections import Counter

from stowage.stages.ir.hierarchy import Hierarchy
from stowage.stages.partition.clusters.partition import Limits
from tests.partition.clusters import algorithm7


def node_sets(hierarchy: Hierarchy) -> dict[int, frozenset[int]]:
    """Member -> nodes inside."""
    count = len(hierarchy.graph.nodes)
    found = {n: frozenset([n]) for n in range(count)}
    for c in hierarchy.clusters:
        found[count + c.cluster] = frozenset().union(*(found[m] for m in c.children))
    return found


def judge(hierarchy: Hierarchy, limits: Limits) -> None:
    """Everything that a hierarchy promises, from the definitions."""
    graph, count = hierarchy.graph, len(hierarchy.graph.nodes)
    sets = node_sets(hierarchy)
    edges = algorithm7.dependencies(graph)
    parent = {m: c.cluster for c in hierarchy.clusters for m in c.children}
    everywhere = Counter(m for c in hierarchy.clusters for m in c.children)
    assert everywhere == Counter(sets.keys() - {count + hierarchy.top.cluster})
    assert sets[count + hierarchy.top.cluster] == set(range(count))
    assert len(hierarchy.top.children) <= max(limits.top_size, limits.smallest - 1)
    for c in hierarchy.clusters:
        inside = sets[count + c.cluster]
        assert c.parent == parent.get(count + c.cluster, -1)
        assert c is hierarchy.top or 2 <= len(c.children) <= limits.size
        assert c.level == 1 + max((hierarchy.clusters[m - count].level for m in c.children if m >= count), default=0)
        assert c.node_count == len(inside)
        assert algorithm7.is_convex(edges, inside)
        small = algorithm7.quotient(edges.subgraph(inside), [sets[m] for m in c.children])
        assert all(a < b for a, b in small.edges)  # topological, hence acyclic
        assert hierarchy.nodes_of(c) == [n for m in c.children for n in _run(hierarchy, m)]

        made = {v for n in inside for v in graph.nodes[n].creates}
        read = {v for n in inside for v in graph.nodes[n].reads}
        needed = {v for n in set(range(count)) - inside for v in graph.nodes[n].reads} | set(graph.results)
        assert set(c.inputs) == read - made
        assert set(c.outputs) == made & needed
        assert len(c.inputs + c.outputs) == len({*c.inputs, *c.outputs})
        assert c.interface_bytes == algorithm7.interface_bytes(graph, inside)
        assert c.score == algorithm7.score(graph, inside, limits.alpha)

        wired = hierarchy.graph_of(c)
        assert tuple(wired.values[i] for i in wired.inputs) == c.inputs
        assert tuple(wired.values[i] for i in wired.outputs) == c.outputs
        assert [wired.values[i] for child in wired.children for i in child.reads] == [
            v for m in c.children for v in hierarchy.member(m).reads
        ]
        assert wired.content_hash() == c.cluster_hash
    order = hierarchy.nodes_of(hierarchy.top)
    position = {n: i for i, n in enumerate(order)}
    assert all(position[a] < position[b] for a, b in edges.edges)


def _run(hierarchy: Hierarchy, member: int) -> list[int]:
    count = len(hierarchy.graph.nodes)
    return [member] if member < count else hierarchy.nodes_of(hierarchy.clusters[member - count])
