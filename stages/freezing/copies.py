"""Counts the copies of weights that measuring their moves takes: each update has one of the weights that it changes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from stowage.stages.ir.costs import Cost
from stowage.stages.ir.graph import ComputeNode
from stowage.stages.ir.trace import Call, TraceTables
from stowage.stages.ir.updates import UPDATE, UPDATE_ALL, jointly_updated, updated_parameter


def costs_with_copies(costs: Iterable[Cost], traces: Iterable[TraceTables]) -> list[Cost]:
    """Return the costs of calls, those of updates with the bytes of their weights as workspace besides."""
    more: dict[str, int] = {}
    for trace in traces:
        weights = _weights(trace)
        more.update({c.signature: n for c in trace.calls if (n := _copied_bytes(c, weights))})
    return [
        replace(c, workspace_bytes=c.workspace_bytes + more[c.signature]) if c.signature in more else c for c in costs
    ]


def nodes_with_copies(trace: TraceTables, nodes: Sequence[ComputeNode]) -> list[ComputeNode]:
    """Return the nodes of a trace, those that update with the bytes of their weights as workspace besides."""
    weights = _weights(trace)
    more = {n.node: sum(_copied_bytes(trace.calls[c], weights) for c in n.calls) for n in nodes if n.phase == "update"}
    return [replace(n, workspace_bytes=n.workspace_bytes + more[n.node]) if more.get(n.node) else n for n in nodes]


def _weights(trace: TraceTables) -> dict[str, int]:
    return {
        v.source.removeprefix("parameter:"): trace.storages[v.storage].nbytes
        for v in trace.values
        if v.source.startswith("parameter:")
    }


def _copied_bytes(call: Call, weights: dict[str, int]) -> int:
    if call.target == UPDATE:
        return weights[updated_parameter(call.arguments)[0]]
    if call.target == UPDATE_ALL:
        return sum(weights[name] for name in jointly_updated(call.arguments))
    return 0
