"""Orders the backward nodes of a region in which the regions inside are single nodes."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import networkx as nx

from stowage.stages.ir.block import BlockNode
from stowage.stages.options.clusters.owners import ending
from stowage.stages.options.clusters.regions import Region


@dataclass(frozen=True)
class Behind:
    """A backward node of the H-Graph: one node of the block, or all of those of a member that is a region.

    Attributes:
        member: position among the members.
        nodes: nodes of the block.
    """

    member: int
    nodes: tuple[int, ...]


def backward_order(region: Region) -> list[Behind]:
    """Return the order of the block, as far as that leaves each inner region in one piece.

    The memory of a schedule depends on the order: in that of the block, a region without regions inside has exactly the
    schedules that the block's nodes have. Regions still follow each other in the opposite order of forward, and an
    update comes after everything that might need the old value (see `owners`), and what reads a gradient that waits
    after what adds to it.
    """
    parts = _parts(region)
    number = {k: i for i, k in enumerate(region.nodes)}
    own = [[number[k] for k in part.nodes] for part in parts]
    nodes = region.graph.nodes
    maker = {a: p for p, inside in enumerate(own) for i in inside for a in nodes[i].creates}
    after = nx.DiGraph()
    after.add_nodes_from(range(len(parts)))
    after.add_edges_from((maker.get(a, p), p) for p, inside in enumerate(own) for i in inside for a in nodes[i].reads)
    after.add_edges_from(pairwise(p for p, part in enumerate(parts) if isinstance(region.members[part.member], Region)))
    for p, inside in enumerate(own):
        last_update = max((i for i in inside if not nodes[i].creates), default=-1)
        after.add_edges_from((q, p) for q, other in enumerate(own) if min(other) < last_update)
    late = ending(region.graph) - {i for i, read in enumerate(region.external_reads) if read}
    for p, inside in enumerate(own):
        last_read = max((i for i in inside if i in late), default=-1)
        after.add_edges_from(
            (q, p) for q, other in enumerate(own) if any(_changes(nodes[i], i, last_read) for i in other)
        )
    after.remove_edges_from([(p, p) for p in range(len(parts))])
    order = nx.lexicographical_topological_sort(after, key=lambda p: min(own[p]))
    return [parts[p] for p in order]


def _changes(node: BlockNode, number: int, last_read: int) -> bool:
    """Return whether a node changes something persistent, and comes before the last one that might read it."""
    return not node.creates and number < last_read


def _parts(region: Region) -> list[Behind]:
    """Return one order that is allowed: that of the members, reversed."""
    found: list[Behind] = []
    for m in range(len(region.members) - 1, -1, -1):
        member = region.members[m]
        if not isinstance(member, Region):
            found.extend(Behind(m, (k,)) for k in member.backward)
        elif member.backward:
            found.append(Behind(m, member.backward))
    return found
