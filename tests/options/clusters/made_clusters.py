"""Clusters of blocks that no trace stands behind."""

from __future__ import annotations

from stowage.stages.ir.block import BlockGraph
from stowage.stages.ir.hierarchy import BlockCluster, FlowGraph, FlowNode
from stowage.stages.partition.clusters.partition import Limits, h_partition


def clusters_of(graph: BlockGraph, limits: Limits) -> list[BlockCluster]:
    """H-Partition of a block that nothing but the tests knows of."""
    made = {a for node in graph.nodes[: graph.forward_count] for a in node.creates}
    nodes = [
        FlowNode(tuple(a for a in n.reads if a in made), n.creates, f"{n.time_s} {n.workspace_bytes}", enters=True)
        for n in graph.nodes[: graph.forward_count]
    ]
    results = tuple(sorted(made.intersection((*graph.output, *graph.outgoing))))
    flow = FlowGraph(nodes, [a.nbytes for a in graph.allocations], results)
    return [
        BlockCluster(
            graph.content_hash(),
            c.cluster,
            c.parent,
            c.level,
            c.children,
            c.node_count,
            c.interface_bytes,
            c.score,
            c.cluster_hash,
        )
        for c in h_partition(flow, limits).clusters
    ]
