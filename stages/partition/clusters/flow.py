"""Makes a graph to partition of the forward part of a traced step."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stowage.stages.ir.costs import Cost
from stowage.stages.ir.graph import ComputeNode
from stowage.stages.ir.hierarchy import FlowGraph, FlowNode
from stowage.stages.ir.trace import TraceTables
from stowage.stages.partition.blocks import gradient_accumulators
from stowage.stages.partition.chain import parameter_free
from stowage.stages.partition.fold import fold


@dataclass(frozen=True)
class Flow:
    """The graph, and the meaning of its numbers.

    Attributes:
        graph: forward computations that depend on a parameter or draw random numbers. The results of others (masks,
            positions) are resident for the whole step, like the batch, and do not appear.
        nodes: compute node of each node of `graph`, by position; the whole step's numbering is that of `fold`.
        storages: storage of each value, by position.
    """

    graph: FlowGraph
    nodes: tuple[ComputeNode, ...]
    storages: tuple[int, ...]


def forward_flow(trace: TraceTables, costs: Mapping[str, Cost]) -> Flow:
    """Fold the calls of a trace and take its forward part.

    Values are what forward computations make. One that only backward reads crosses no border, since a cluster has its
    backward part with it.

    Raises:
        TableError: a call of the trace has no cost.
    """
    everything = fold(trace, costs).nodes
    parameters = frozenset(s.storage for s in trace.storages if s.role in ("parameter", "state"))
    planned = [n for n in everything if n.phase != "update"]
    shared = parameter_free(planned, parameters, gradient_accumulators(everything, trace))
    nodes = [n for n in planned if n.phase == "forward" and n.node not in shared]
    batch = {s.storage for s in trace.storages if s.role == "input"}
    for node in planned:
        if node.node in shared and batch.intersection(node.reads):
            batch.update(node.creates)
    storages = [s for n in nodes for s in n.creates]
    value_of = {s: v for v, s in enumerate(storages)}
    order = orders(nodes)
    meta = trace.meta
    results = meta.outputs or ((meta.loss_value,) if meta.loss_value >= 0 else ())
    needed = (value_of.get(trace.values[v].storage) for v in results)
    flow = tuple(
        FlowNode(
            reads=tuple(value_of[s] for s in n.reads if s in value_of),
            creates=tuple(value_of[s] for s in n.creates),
            key=_key(n, trace),
            after=order[i],
            enters=not batch.isdisjoint(n.reads),
        )
        for i, n in enumerate(nodes)
    )
    graph = FlowGraph(
        nodes=flow,
        value_bytes=tuple(trace.storages[s].nbytes for s in storages),
        results=tuple(dict.fromkeys(v for v in needed if v is not None)),
    )
    return Flow(graph, tuple(nodes), tuple(storages))


def _key(node: ComputeNode, trace: TraceTables) -> str:
    """Hash what a node computes: operators, shapes, constants, and whether it may run again."""
    text = "\n".join([*(trace.calls[c].signature for c in node.calls), str(node.once)])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def orders(nodes: Sequence[ComputeNode]) -> list[tuple[int, ...]]:
    """Return, for each node, the nodes that must run first for their effects.

    Random draws keep eager's order, and so do reads and changes of one persistent storage.
    """
    found: list[tuple[int, ...]] = []
    last_random: list[int] = []
    last_change: dict[int, int] = {}
    reads_since: dict[int, list[int]] = defaultdict(list)
    for i, node in enumerate(nodes):
        before: set[int] = set()
        if node.random:
            before.update(last_random)
            last_random = [i]
        for storage in node.reads:
            if storage in last_change:
                before.add(last_change[storage])
            if storage not in node.mutates:
                reads_since[storage].append(i)
        for storage in node.mutates:
            before.update(reads_since.pop(storage, ()))
            if storage in last_change:
                before.add(last_change[storage])
            last_change[storage] = i
        found.append(tuple(sorted(before)))
    return found
