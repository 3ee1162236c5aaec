"""Tree decompositions of a block's nodes, and bags that split them into small parts.

The nodes of a graph are put into bags that form a tree: adjacent nodes share a bag, and the bags of one node are
connected. Hence what is left of the graph without the nodes of one bag falls apart along the tree without that bag.
The decomposition comes from networkx (Bodlaender and Koster, "Treewidth computations I: upper bounds", 2010).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import networkx as nx
from networkx.algorithms.approximation import treewidth_min_degree, treewidth_min_fill_in

# With more nodes than this, minimum fill-in takes too long.
_FILL_IN_NODES = 150
# A clique of more inputs than this is left out of the moral graph.
_WIDEST_CLIQUE = 12


@dataclass(frozen=True)
class TreeDecomposition:
    """A rooted tree of bags.

    Attributes:
        bags: nodes of each bag; every bag comes after its parent.
        parent: the parent bag; −1 for the root.
        bag_of: for each node, its bag nearest to the root.
    """

    bags: tuple[frozenset[int], ...]
    parent: tuple[int, ...]
    bag_of: tuple[int, ...]

    @property
    def width(self) -> int:
        """Return the number of nodes of the largest bag, less one."""
        return max((len(bag) for bag in self.bags), default=1) - 1

    def separator(self, tree: Sequence[int], nodes: Sequence[int], size: Sequence[int], largest: float) -> int:
        """Return the lightest bag of `tree` whose removal leaves no large part.

        No part of the rest has more than the share `largest` of `nodes`; a bag that halves them always exists.

        Args:
            tree: a connected part of the bags, ascending.
            nodes: nodes whose bags are all in it.
            size: weight of each node of the graph; in a bag only those of `nodes` count.
            largest: 0.5 or more.
        """
        below, heaviest = dict.fromkeys(tree, 0), dict.fromkeys(tree, 0)
        for node in nodes:
            below[self.bag_of[node]] += 1
        for bag in reversed(tree):
            above = self.parent[bag]
            if above in below:
                below[above] += below[bag]
                heaviest[above] = max(heaviest[above], below[bag])
        parts = {bag: max(heaviest[bag], len(nodes) - below[bag]) for bag in tree}
        most, members = max(largest * len(nodes), min(parts.values())), set(nodes)
        weight = {
            bag: sum(size[node] for node in self.bags[bag] if node in members) for bag in tree if parts[bag] <= most
        }
        return min(weight, key=lambda bag: (weight[bag], parts[bag], bag))

    def without(self, tree: Sequence[int], removed: int) -> tuple[list[list[int]], dict[int, int]]:
        """Return the parts of `tree` without the bag `removed`, and the number of the part of each bag."""
        parts: list[list[int]] = []
        part_of: dict[int, int] = {}
        for bag in tree:
            if bag == removed:
                continue
            number = part_of.get(self.parent[bag])
            if number is None:
                number = len(parts)
                parts.append([])
            part_of[bag] = number
            parts[number].append(bag)
        return parts, part_of


def decompose(reads_of: Sequence[Sequence[int]]) -> TreeDecomposition:
    """Make a tree decomposition of small width of the moral graph.

    There a node and all that it reads are adjacent in pairs, so that one bag has all that must be in memory while it
    runs.

    Args:
        reads_of: for each node those whose results it reads.
    """
    graph = nx.Graph()
    graph.add_nodes_from(range(len(reads_of)))
    for node, read in enumerate(reads_of):
        graph.add_edges_from((p, node) for p in read)
        if len(read) <= _WIDEST_CLIQUE:
            graph.add_edges_from(combinations(read, 2))
    decomposition = treewidth_min_fill_in if len(reads_of) <= _FILL_IN_NODES else treewidth_min_degree
    return _rooted(decomposition(graph)[1], len(reads_of))


def _rooted(tree: nx.Graph, count: int) -> TreeDecomposition:
    """Order the bags by a search from the first one."""
    bags: list[frozenset[int]] = []
    parent: list[int] = []
    number: dict[frozenset[int], int] = {}
    bag_of: dict[int, int] = {}
    start = next(iter(tree.nodes))
    for above, bag in [(None, start), *nx.bfs_edges(tree, start)]:
        number[bag] = len(bags)
        for node in bag:
            bag_of.setdefault(node, len(bags))
        parent.append(-1 if above is None else number[above])
        bags.append(frozenset(bag))
    return TreeDecomposition(tuple(bags), tuple(parent), tuple(bag_of[node] for node in range(count)))
