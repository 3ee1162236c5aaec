"""Counts what measuring the moves of weights takes: each update has a copy of the weights that it changes.

Once it is over, sums are taken of one copy after the other, which take a little besides (`ir.move_bytes`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod

from stowage.stages.ir.costs import Cost
from stowage.stages.ir.graph import ComputeNode
from stowage.stages.ir.move_bytes import scratch_bytes
from stowage.stages.ir.trace import Call, TraceTables
from stowage.stages.ir.updates import UPDATE, UPDATE_ALL, jointly_updated, updated_parameter


@dataclass(frozen=True)
class _Measured:
    """What measuring moves takes in an update: copies of weights during it, and the more of both behind it."""

    copied_bytes: int
    scratch_bytes: int

    def over(self, workspace_bytes: int) -> int:
        """Return the workspace of the update with it."""
        return self.copied_bytes + max(workspace_bytes, self.scratch_bytes)


def costs_with_copies(costs: Iterable[Cost], traces: Iterable[TraceTables], *, relative: bool) -> list[Cost]:
    """Return the costs of calls, those of updates with what measuring moves takes as workspace besides.

    Args:
        costs: the costs of calls.
        traces: what the calls are in.
        relative: see `runtime.moves`.
    """
    more: dict[str, _Measured] = {}
    for trace in traces:
        weights = _Weights(trace)
        more.update({c.signature: n for c in trace.calls if (n := weights.measured(c, relative)) is not None})
    return [
        replace(c, workspace_bytes=more[c.signature].over(c.workspace_bytes)) if c.signature in more else c
        for c in costs
    ]


def nodes_with_copies(trace: TraceTables, nodes: Sequence[ComputeNode], *, relative: bool) -> list[ComputeNode]:
    """Return the nodes of a trace, those that update with what measuring moves takes as workspace besides."""
    weights = _Weights(trace)
    found: list[ComputeNode] = []
    for node in nodes:
        calls = [trace.calls[c] for c in node.calls] if node.phase == "update" else []
        for measured in (weights.measured(call, relative) for call in calls):
            if measured is not None:
                node = replace(node, workspace_bytes=measured.over(node.workspace_bytes))
        found.append(node)
    return found


class _Weights:
    """Knows the copies of the weights of a trace."""

    def __init__(self, trace: TraceTables) -> None:
        self._device = trace.meta.device
        self._sizes: dict[str, tuple[int, int]] = {}
        """By parameter, its elements and the bytes of each."""
        for value in trace.values:
            role, _, name = value.source.partition(":")
            if role == "parameter":
                itemsize = _itemsize(value.dtype)
                nbytes = trace.storages[value.storage].nbytes  # of a shard, or of something larger
                self._sizes[name] = min(prod(value.shape), nbytes // itemsize), itemsize

    def measured(self, call: Call, relative: bool) -> _Measured | None:
        """Return what measuring moves takes in a call; None where it is no update."""
        if call.target not in (UPDATE, UPDATE_ALL):
            return None
        joint = call.target == UPDATE_ALL
        names = list(jointly_updated(call.arguments)) if joint else [updated_parameter(call.arguments)[0]]
        sizes = [self._sizes[name] for name in names]
        scratch = (scratch_bytes(*size, self._device, relative=relative) for size in sizes)
        return _Measured(sum(map(prod, sizes)), max(scratch, default=0))


def _itemsize(dtype: str) -> int:
    """Return the bytes of an element, from the bits in the name of its type."""
    bits = re.search(r"\d+", dtype)
    return int(bits[0]) // 8 if bits else 1
