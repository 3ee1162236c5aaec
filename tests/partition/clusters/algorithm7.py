"""H-Partition as the thesis writes it (Algorithm 7), with sets, for small graphs: what the fast one is compared with.

Nothing is shared with `stages/partition`: dominators come from networkx, paths from ancestors and descendants, scores
from the definition. Ties: the candidate with the first node, then the fewest nodes, then the first that was formed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import networkx as nx

from stowage.stages.ir.hierarchy import FlowGraph

Nodes = frozenset[int]
ROOT = -1


def interface_bytes(graph: FlowGraph, inside: Nodes) -> int:
    """Bytes of all input and output values of a set of nodes (the sum in equation 3.1)."""
    made = {v for n in inside for v in graph.nodes[n].creates}
    read = {v for n in inside for v in graph.nodes[n].reads}
    outside = {v for n, node in enumerate(graph.nodes) if n not in inside for v in node.reads} | set(graph.results)
    return sum(graph.value_bytes[v] for v in (read - made) | (made & outside))


def score(graph: FlowGraph, inside: Nodes, alpha: float) -> float:
    """Equation 3.1."""
    return interface_bytes(graph, inside) * float(len(inside) ** alpha)


def dependencies(graph: FlowGraph) -> nx.DiGraph:
    """Nodes of the forward graph, an edge for each value that one makes and another reads.

    And for each pair in `after`, unless a path of values says so already: such an edge would only hide an a(x).
    """
    maker = {v: n for n, node in enumerate(graph.nodes) for v in node.creates}
    values = nx.DiGraph()
    values.add_nodes_from(range(len(graph.nodes)))
    for n, node in enumerate(graph.nodes):
        values.add_edges_from((maker[v], n) for v in node.reads if v in maker)
    found = values.copy()
    for n, node in enumerate(graph.nodes):
        found.add_edges_from((before, n) for before in node.after if not nx.has_path(values, before, n))
    return found


def quotient(edges: nx.DiGraph, parts: list[Nodes]) -> nx.DiGraph:
    """Parts as nodes, by position."""
    part_of = {n: i for i, part in enumerate(parts) for n in part}
    found = nx.DiGraph()
    found.add_nodes_from(range(len(parts)))
    found.add_edges_from((part_of[a], part_of[b]) for a, b in edges.edges if part_of[a] != part_of[b])
    return found


def candidates(level: nx.DiGraph, largest: int) -> list[Nodes]:
    """For each x all nodes between a(x) and x, with and without either."""
    rooted = level.copy()
    rooted.add_edges_from((ROOT, n) for n in level if level.in_degree(n) == 0)
    dominator = nx.immediate_dominators(rooted, ROOT)
    found: list[Nodes] = []
    for x in sorted(level):
        a = dominator[x]
        between = frozenset(nx.descendants(rooted, a) & nx.ancestors(rooted, x))
        four = (between | {a, x}, between | {x}, between | {a}, between)
        found += [group for group in four if ROOT not in group and 2 <= len(group) <= largest]
    return found


def partition(
    graph: FlowGraph, top_size: int, size: int, alpha: float, *, most_levels: int = 50
) -> tuple[list[Nodes], list[Nodes]] | None:
    """Every cluster as a set of nodes of the forward graph, level by level, and the members of the top.

    None where Algorithm 7 does not end: a level without candidates that is larger than M^t; or after `most_levels`.
    """
    edges = dependencies(graph)
    level: list[Nodes] = [frozenset([n]) for n in range(len(graph.nodes))]
    clusters: list[Nodes] = []
    enough = max(top_size, 3)  # no partition under 4 nodes
    while len(level) > enough:
        if most_levels == 0:
            return None
        most_levels -= 1
        pool = dict(enumerate(candidates(quotient(edges, level), size)))
        groups: list[Nodes] = [frozenset([i]) for i in range(len(level))]
        if not pool:
            return None

        def contents(group: Nodes, level: list[Nodes] = level) -> Nodes:
            return frozenset().union(*(level[i] for i in group))

        while pool and len(groups) > enough:
            best = min(pool, key=lambda c: (score(graph, contents(pool[c]), alpha), min(pool[c]), len(pool[c]), c))
            chosen = pool[best]
            groups = [g for g in groups if not g & chosen] + [chosen]
            for c, other in list(pool.items()):
                united = other | chosen if other & chosen else other
                if len(united) > size or united in groups:
                    del pool[c]
                else:
                    pool[c] = united
        clusters += [contents(g) for g in groups if len(g) > 1]
        order = list(
            nx.lexicographical_topological_sort(
                quotient(edges, [contents(g) for g in groups]), key=lambda i, groups=groups: min(groups[i])
            )
        )
        level = [contents(groups[i]) for i in order]
    return clusters, level


def is_convex(edges: nx.DiGraph, inside: Nodes) -> bool:
    """Definition 3.3.1: every node on a path between two nodes inside is inside."""

    def beyond(step: Callable[[int], Iterable[int]]) -> set[int]:
        found: set[int] = set()
        stack = list(inside)
        while stack:
            new = set(step(stack.pop())) - found - inside
            found |= new
            stack += new
        return found

    return not beyond(edges.successors) & beyond(edges.predecessors)
