"""Scales a partitioned step to another size: its nodes and blocks, with the sizes and costs of another trace."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

from stowage.stages.ir.block import BlockGraph
from stowage.stages.ir.costs import Cost
from stowage.stages.ir.graph import Block, ComputeNode
from stowage.stages.ir.sums import takes_of
from stowage.stages.ir.trace import TraceTables
from stowage.stages.partition.fold import flagged_bytes

LEAST_S = 1e-7
"""Least time of a node, in seconds."""


def structure_of(trace: TraceTables) -> str:
    """Hash a trace without its sizes: equal for steps that make the same calls on the same storages."""
    content = (
        [(s.role, s.name) for s in trace.storages],
        [(v.storage, v.call, v.output, v.dtype, len(v.shape), v.source) for v in trace.values],
        [
            (c.target, c.reads, c.returns, c.mutates, c.is_view, c.is_random, bool(c.replay_arguments), c.phase)
            for c in trace.calls
        ],
        [(g.parameter, g.parameter_value, g.gradient_value) for g in trace.gradients],
        trace.meta.loss_value,
    )
    return hashlib.sha256(repr(content).encode()).hexdigest()


def scaled(
    nodes: Sequence[ComputeNode],
    blocks: Sequence[Block],
    before: tuple[TraceTables, Mapping[str, Cost]],
    now: tuple[TraceTables, Mapping[str, Cost]],
) -> tuple[list[ComputeNode], list[Block]] | None:
    """Scale nodes and blocks to other sizes and costs; None where sums that were written over a summand cannot be now.

    Args:
        nodes: compute nodes of the trace before.
        blocks: blocks of the trace before.
        before: the old trace, with the costs of its calls.
        now: the new trace, of the same structure (see `structure_of`), with the costs of its calls.
    """
    (old, old_costs), (trace, costs) = before, now
    found: list[ComputeNode] = []
    for node in nodes:
        calls = [trace.calls[c] for c in node.calls]
        if takes_of(calls, trace) != node.takes:
            return None
        own = [costs[c.signature] for c in calls]
        more_s = sum(c.time_s for c in own) - sum(old_costs[old.calls[c].signature].time_s for c in node.calls)
        found.append(
            replace(
                node,
                time_s=max(node.time_s + more_s, LEAST_S),
                workspace_bytes=max(c.workspace_bytes for c in own),
                flagged_bytes=flagged_bytes(calls, own),
                copied_bytes=max(c.copied_bytes for c in own),
                estimated=any(c.source != "measured" for c in own),
            )
        )
    return found, [_block(block, found, old, trace) for block in blocks]


def _block(block: Block, nodes: Sequence[ComputeNode], old: TraceTables, trace: TraceTables) -> Block:
    graph = BlockGraph.from_json(block.graph)
    rows = tuple(
        replace(row, time_s=nodes[n].time_s, workspace_bytes=nodes[n].workspace_bytes)
        for row, n in zip(graph.nodes, block.nodes, strict=True)
    )
    allocations = tuple(
        replace(a, nbytes=trace.storages[s].nbytes) for a, s in zip(graph.allocations, block.storages, strict=True)
    )
    graph = replace(graph, nodes=rows, allocations=allocations)
    # Its storages are not known here, so assume that it grows with everything else. The referee counts it exactly.
    grown = max(1, _temporary_bytes(trace)) / max(1, _temporary_bytes(old))
    return replace(
        block,
        block_hash=graph.content_hash(),
        graph=graph.to_json(),
        resident_bytes=round(block.resident_bytes * grown),
    )


def _temporary_bytes(trace: TraceTables) -> int:
    return sum(s.nbytes for s in trace.storages if s.role == "temporary")
