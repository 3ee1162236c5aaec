"""Counts what measuring the moves of weights takes: each update has a copy of the weights that it changes.

Once it is over, sums are taken of one copy after the other, which take a little besides (`ir.move_bytes`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TypeVar

from stowage.stages.ir.costs import Cost
from stowage.stages.ir.graph import ComputeNode
from stowage.stages.ir.move_bytes import scratch_bytes
from stowage.stages.ir.trace import Call, TraceTables
from stowage.stages.ir.units import Unit, bits_of
from stowage.stages.ir.updates import UPDATE, UPDATE_ALL, jointly_updated, updated_parameter

_Update = TypeVar("_Update", Cost, ComputeNode)


@dataclass(frozen=True)
class _Measured:
    """What measuring moves takes in an update: copies of weights, and what sums of one take once it is over."""

    copied_bytes: int
    scratch_bytes: int
    joint: bool

    def beside(self, update: _Update) -> _Update:
        """Return an update with it in its workspace."""
        workspace_bytes = self.copied_bytes + max(update.workspace_bytes, self.scratch_bytes)
        return replace(update, workspace_bytes=workspace_bytes, copied_bytes=self.copied_bytes if self.joint else 0)


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
    return [more[c.signature].beside(c) if c.signature in more else c for c in costs]


def nodes_with_copies(trace: TraceTables, nodes: Sequence[ComputeNode], *, relative: bool) -> list[ComputeNode]:
    """Return the nodes of a trace, those that update with what measuring moves takes as workspace besides."""
    weights = _Weights(trace)
    found: list[ComputeNode] = []
    for node in nodes:
        calls = [trace.calls[c] for c in node.calls] if node.phase == "update" else []
        for measured in (weights.measured(call, relative) for call in calls):
            if measured is not None:
                node = measured.beside(node)
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

    def nbytes(self, name: str) -> int:
        """Return the bytes of the copy of a parameter."""
        return prod(self._sizes[name])

    def measured(self, call: Call, relative: bool) -> _Measured | None:
        """Return what measuring moves takes in a call; None where it is no update."""
        if call.target not in (UPDATE, UPDATE_ALL):
            return None
        joint = call.target == UPDATE_ALL
        names = list(jointly_updated(call.arguments)) if joint else [updated_parameter(call.arguments)[0]]
        sizes = [self._sizes[name] for name in names]
        scratch = (scratch_bytes(*size, self._device, relative=relative) for size in sizes)
        return _Measured(sum(map(prod, sizes)), max(scratch, default=0), joint)


def copies_by_guard(trace: TraceTables, node: ComputeNode, units: Sequence[Unit]) -> dict[int, int]:
    """Return the bytes of a node's `copied_bytes` by the guard under which they are taken: that of the weight's unit.

    Weights that are in no unit are not measured.
    """
    if not node.copied_bytes:
        return {}
    weights, of = _Weights(trace), bits_of(units)
    found: dict[int, int] = {}
    for call in (trace.calls[c] for c in node.calls):
        for name in jointly_updated(call.arguments) if call.target == UPDATE_ALL else ():
            if name in of:
                found[of[name]] = found.get(of[name], 0) + weights.nbytes(name)
    return found


def _itemsize(dtype: str) -> int:
    """Return the bytes of an element, from the bits in the name of its type."""
    bits = re.search(r"\d+", dtype)
    return int(bits[0]) // 8 if bits else 1
