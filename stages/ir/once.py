"""Says which nodes may run only once because of what they do, whatever a plan decides to keep."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from stowage.stages.ir.graph import ComputeNode
from stowage.stages.ir.operators import SPENDS
from stowage.stages.ir.trace import Call, TraceTables


def changes_for_good(calls: Sequence[Call], temporary: Collection[int]) -> bool:
    """Say whether calls, made again, would not do again what they did: they write what outlives them, or use it up.

    Args:
        calls: the calls of one node.
        temporary: storages that are made during the step.
    """
    writing = [c for c in calls if any(s not in temporary for s in c.mutates)]
    return any(not c.replay_arguments for c in writing) or any(c.target in SPENDS for c in calls)


def overtaken(nodes: Sequence[ComputeNode]) -> frozenset[int]:
    """Return the nodes that read a persistent storage which a later node changes.

    It is changed when that node runs first, also by one that can run again without changing it, as batch normalisation
    can. What a node changes itself does not count: made again, such a node does not read it. Updates of parameters are
    left out: whether a node runs before or after them is for a plan to decide.

    Args:
        nodes: in a topological order, each at the position of its number.
    """
    last_change = {s: n.node for n in nodes if n.phase != "update" for s in n.mutates}
    return frozenset(
        n.node for n in nodes if any(last_change.get(s, -1) > n.node for s in n.reads if s not in n.mutates)
    )


def once_by_trace(trace: TraceTables, nodes: Sequence[ComputeNode]) -> frozenset[int]:
    """Return the nodes that no schedule of a trace may run again.

    Nodes that run once only because of how plans are made, such as those of values that are always kept, are not among
    them.
    """
    temporary = {s.storage for s in trace.storages if s.role == "temporary"}
    changing = {n.node for n in nodes if changes_for_good([trace.calls[c] for c in n.calls], temporary)}
    return frozenset(n.node for n in nodes if n.once) & (overtaken(nodes) | changing)
