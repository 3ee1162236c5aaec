"""Describes a block as a tree of regions: each cluster with its forward and backward nodes, and its border."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stowage.stages.ir.block import BlockAllocation, BlockGraph, BlockNode
from stowage.stages.ir.hierarchy import BlockCluster
from stowage.stages.options.clusters.owners import owners


@dataclass(frozen=True)
class Single:
    """One forward node with its backward nodes, as nodes of the block."""

    forward: int
    backward: tuple[int, ...]


@dataclass(frozen=True)
class Region:
    """A cluster (H-Cluster, thesis 3.2.1), or the whole block.

    Attributes:
        graph: its nodes as a block of their own: `output` is what others need of its forward part, `incoming` the
            gradients that others make for it, `outgoing` those that it makes for others. The results of other forward
            nodes are resident outside, as the input of a block is.
        nodes: node of the block for each node of `graph`, by position.
        values: allocation of the block for each allocation of `graph`.
        external: allocations of the block that it reads and that forward nodes outside make.
        external_reads: for each node of `graph`, positions in `external` that it reads, ascending.
        members: the regions and single nodes inside, in order.
        key: equal for regions that are equal in everything, inside too.
    """

    graph: BlockGraph
    nodes: tuple[int, ...]
    values: tuple[int, ...]
    external: tuple[int, ...]
    external_reads: tuple[tuple[int, ...], ...]
    members: tuple[Region | Single, ...]
    key: str

    @property
    def forward(self) -> tuple[int, ...]:
        """Return the forward nodes of the block."""
        return self.nodes[: self.graph.forward_count]

    @property
    def backward(self) -> tuple[int, ...]:
        """Return the backward nodes of the block."""
        return self.nodes[self.graph.forward_count :]

    def regions(self) -> list[Region]:
        """Return the regions directly inside."""
        return [m for m in self.members if isinstance(m, Region)]


def clusters_by_block(rows: Iterable[BlockCluster]) -> dict[str, tuple[BlockCluster, ...]]:
    """Return the clusters of each block hash in order, each once even if several variants have the block."""
    found: dict[str, dict[int, BlockCluster]] = {}
    for row in rows:
        found.setdefault(row.block_hash, {}).setdefault(row.cluster, row)
    return {name: tuple(inside[c] for c in sorted(inside)) for name, inside in found.items()}


def regions_of(block: BlockGraph, clusters: Sequence[BlockCluster]) -> Region:
    """Make the tree of regions of a block.

    Args:
        block: the block.
        clusters: clusters of its forward part, inner ones before outer ones, the top last; see `ir/hierarchy.py`.
    """
    return _Builder(block, clusters).region(len(clusters) - 1)


class _Builder:
    def __init__(self, block: BlockGraph, clusters: Sequence[BlockCluster]) -> None:
        self.block, self.clusters = block, clusters
        self.creator, self.readers = block.creator(), block.readers()
        self.count = block.forward_count
        order = self._order(len(clusters) - 1)
        self.behind: dict[int, list[int]] = {k: [] for k in order}
        for i, place in enumerate(owners(block, order)):
            self.behind[order[place]].append(self.count + i)

    def _order(self, cluster: int) -> list[int]:
        """Return the forward nodes in the order in which clusters run them."""
        found: list[int] = []
        stack = list(reversed(self.clusters[cluster].children))
        while stack:
            member = stack.pop()
            if member < self.count:
                found.append(member)
            else:
                stack.extend(reversed(self.clusters[member - self.count].children))
        return found

    def region(self, cluster: int) -> Region:
        members: list[Region | Single] = []
        for member in self.clusters[cluster].children:
            if member < self.count:
                members.append(Single(member, tuple(self.behind[member])))
            else:
                members.append(self.region(member - self.count))
        forward = [k for m in members for k in ([m.forward] if isinstance(m, Single) else m.forward)]
        backward = sorted(k for m in members for k in m.backward)  # as in the block
        return self._describe(forward, backward, tuple(members), top=cluster == len(self.clusters) - 1)

    def _describe(
        self, forward: list[int], backward: list[int], members: tuple[Region | Single, ...], *, top: bool
    ) -> Region:
        block, inside = self.block, {*forward, *backward}
        nodes = [*forward, *backward]
        made = [a for k in nodes for a in block.nodes[k].creates]
        own = set(made)
        read = dict.fromkeys(a for k in nodes for a in block.nodes[k].reads if a not in own)
        external = [a for a in read if self.creator.get(a, self.count) < self.count]
        arriving = [a for a in read if self.creator.get(a, self.count) >= self.count]
        kept = set(block.output) | set(block.outgoing)
        needed = {a for a in made if a in kept or any(r not in inside for r in self.readers[a])}
        early = {a for k in forward for a in block.nodes[k].creates}
        output, outgoing = needed & early, needed - early
        if top:
            arriving = [*arriving, *(a for a in block.incoming if a not in arriving)]
            output, outgoing = set(block.output), set(block.outgoing)
        values = [*made, *arriving]
        at = {a: i for i, a in enumerate(values)}
        place = {a: i for i, a in enumerate(external)}
        graph = BlockGraph(
            nodes=tuple(self._node(k, at) for k in nodes),
            forward_count=len(forward),
            allocations=tuple(BlockAllocation(block.allocations[a].name, block.allocations[a].nbytes) for a in values),
            output=_positions(output, at),
            incoming=_positions(arriving, at),
            outgoing=_positions(outgoing, at),
        )
        reads = tuple(_positions((a for a in block.nodes[k].reads if a in place), place) for k in nodes)
        number = {k: i for i, k in enumerate(nodes)}
        shape = [_shape(m, number) for m in members]
        text = json.dumps([graph.content_hash(), reads, shape], separators=(",", ":"))
        key = hashlib.sha256(text.encode()).hexdigest()[:20]
        return Region(graph, tuple(nodes), tuple(values), tuple(external), reads, members, key)

    def _node(self, k: int, at: dict[int, int]) -> BlockNode:
        node = self.block.nodes[k]
        reads = _positions((a for a in node.reads if a in at), at)
        creates = _positions(node.creates, at)
        return BlockNode(node.name, node.time_s, node.workspace_bytes, reads, creates, node.once)


def _positions(allocations: Iterable[int], at: dict[int, int]) -> tuple[int, ...]:
    return tuple(sorted(at[a] for a in allocations))


def _shape(member: Region | Single, number: dict[int, int]) -> list[object]:
    """Return the nodes inside, and how they are grouped."""
    if isinstance(member, Single):
        return [number[member.forward], *(number[k] for k in member.backward)]
    return [member.key, *(number[k] for k in member.nodes)]
