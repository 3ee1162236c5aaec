"""Makes a graph to partition of the forward part of a block, and rows of its clusters."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from stowage.stages.ir.block import BlockGraph
from stowage.stages.ir.graph import Block, ComputeNode
from stowage.stages.ir.hierarchy import BlockCluster, FlowGraph, FlowNode
from stowage.stages.ir.trace import TraceTables
from stowage.stages.partition.clusters.flow import orders
from stowage.stages.partition.clusters.partition import Limits, h_partition


def block_clusters(
    trace: TraceTables, nodes: Sequence[ComputeNode], blocks: Sequence[Block], limits: Limits
) -> list[BlockCluster]:
    """Partition every distinct block with more than M^l forward nodes by H-Partition.

    Args:
        trace: the trace from which `nodes` and `blocks` were made.
        nodes: compute nodes, as `make_blocks` returns them.
        blocks: blocks, as `make_blocks` returns them.
        limits: sizes of clusters.
    """
    found: list[BlockCluster] = []
    alike: dict[str, list[Block]] = {}
    for block in blocks:
        alike.setdefault(block.block_hash, []).append(block)
    for name, same in alike.items():
        graph = BlockGraph.from_json(same[0].graph)
        if graph.forward_count <= limits.size:
            continue
        inside = [[nodes[n] for n in block.nodes[: graph.forward_count]] for block in same]
        hierarchy = h_partition(_flow(graph, inside, trace), limits)
        found.extend(
            BlockCluster(
                block_hash=name,
                cluster=c.cluster,
                parent=c.parent,
                level=c.level,
                children=c.children,
                node_count=c.node_count,
                interface_bytes=c.interface_bytes,
                score=c.score,
                cluster_hash=c.cluster_hash,
                variant=same[0].variant,
            )
            for c in hierarchy.clusters
        )
    return found


def _flow(graph: BlockGraph, inside: Sequence[Sequence[ComputeNode]], trace: TraceTables) -> FlowGraph:
    """Make the graph of the forward part; orders that one of the identical blocks needs hold in all."""
    count = graph.forward_count
    found = [[set(own) for own in orders(nodes)] for nodes in inside]
    for before, nodes in zip(found, inside, strict=True):
        _follow_long_lived(before, graph, nodes)
    after = [tuple(sorted(set().union(*together))) for together in zip(*found)]
    entering = [_entering(nodes, trace) for nodes in inside]
    made = {a for node in graph.nodes[:count] for a in node.creates}
    behind = _backward_of(graph)
    return FlowGraph(
        nodes=tuple(
            FlowNode(
                reads=tuple(a for a in graph.nodes[k].reads if a in made),
                creates=graph.nodes[k].creates,
                key=behind[k],
                after=after[k],
                enters=any(k in e for e in entering),
            )
            for k in range(count)
        ),
        value_bytes=tuple(a.nbytes for a in graph.allocations),
        results=tuple(sorted(made.intersection((*graph.output, *graph.outgoing)))),
    )


def _follow_long_lived(before: Sequence[set[int]], graph: BlockGraph, nodes: Sequence[ComputeNode]) -> None:
    """Add the makers of what each node reads that the block does not count: long-lived values, resident outside."""
    maker = {s: k for k, n in enumerate(nodes) if len(n.creates) > len(graph.nodes[k].creates) for s in n.creates}
    for k, (own, node) in enumerate(zip(before, nodes, strict=True)):
        own.update({maker[s] for s in node.reads if s in maker} - {k})


def _entering(nodes: Sequence[ComputeNode], trace: TraceTables) -> set[int]:
    """Return positions of nodes that read the batch or results of other blocks: no parameter, and not made here."""
    own = {s for n in nodes for s in n.creates}
    kept = {s.storage for s in trace.storages if s.role in ("parameter", "state", "buffer", "constant")}
    return {k for k, n in enumerate(nodes) if any(s not in own and s not in kept for s in n.reads)}


def _backward_of(graph: BlockGraph) -> list[str]:
    """Hash what each forward node computes, with the backward nodes that read what it reads or makes."""
    creator, readers = graph.creator(), graph.readers()
    found: list[str] = []
    for k in range(graph.forward_count):
        node = graph.nodes[k]
        touched = [a for a in (*node.reads, *node.creates) if creator.get(a, graph.forward_count) < graph.forward_count]
        behind = sorted({r for a in touched for r in readers[a] if r >= graph.forward_count})
        costs = [(n.time_s, n.workspace_bytes, n.once) for n in (node, *(graph.nodes[r] for r in behind))]
        text = json.dumps([costs, [graph.allocations[a].nbytes for a in node.creates]], separators=(",", ":"))
        found.append(hashlib.sha256(text.encode()).hexdigest()[:12])
    return found
