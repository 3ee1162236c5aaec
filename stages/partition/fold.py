"""Folds calls into compute nodes (cNodes): in-place calls join the node that owns the storage (thesis 2.3)."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import networkx as nx

from stowage.stages.ir.collectives import COLLECTIVES
from stowage.stages.ir.costs import Cost
from stowage.stages.ir.errors import TableError
from stowage.stages.ir.flags import flag_count, together
from stowage.stages.ir.graph import SHARED, ComputeNode
from stowage.stages.ir.once import changes_for_good, overtaken
from stowage.stages.ir.sums import takes_of
from stowage.stages.ir.trace import INSIDE, Call, TraceTables


@dataclass(frozen=True)
class Folded:
    """Compute nodes in a topological order that keeps eager's order, their blocks not yet known."""

    nodes: list[ComputeNode]
    storage_bytes: list[int]
    temporary: frozenset[int]


def fold(trace: TraceTables, costs: Mapping[str, Cost]) -> Folded:
    """Make compute nodes from calls.

    Calls that write a temporary storage join the call that made it, and so does every call that reads it in between:
    it would find another content after the node has run. Groups that would then depend on each other are merged.

    Args:
        trace: the trace.
        costs: costs by call signature.

    Raises:
        TableError: a call has no cost.
    """
    storage_of = [v.storage for v in trace.values]
    temporary = frozenset(s.storage for s in trace.storages if s.role == "temporary")
    calls = [c for c in trace.calls if not c.is_view]
    creator: dict[int, int] = {}
    touched_by: dict[int, list[int]] = defaultdict(list)
    graph = nx.DiGraph()
    joined = nx.Graph()
    for call in calls:
        graph.add_node(call.call)
        joined.add_node(call.call)
        for storage in {storage_of[v] for v in call.reads} | set(call.mutates):
            if storage in temporary:
                if storage in call.mutates:
                    for other in touched_by[storage]:
                        joined.add_edge(other, call.call)
                elif storage in creator:
                    graph.add_edge(creator[storage], call.call)
            touched_by[storage].append(call.call)
        for storage in {storage_of[v] for v in call.returns if v >= 0}:
            if storage in temporary and storage not in creator:
                creator[storage] = call.call
                touched_by[storage].append(call.call)
    for storage in (s.storage for s in trace.storages if s.name.endswith(INSIDE)):
        joined.add_edges_from((creator[storage], other) for other in touched_by[storage])
    _join_sole_readers(calls, storage_of, creator, joined)
    _order_persistent(calls, storage_of, temporary, graph)
    _order_random(calls, graph)

    group_of: dict[int, int] = {}
    for component in nx.connected_components(joined):
        group_of.update(dict.fromkeys(component, min(component)))
    grouped = nx.DiGraph()
    grouped.add_nodes_from(group_of.values())
    grouped.add_edges_from((group_of[a], group_of[b]) for a, b in graph.edges if group_of[a] != group_of[b])
    members: dict[int, list[int]] = defaultdict(list)
    leader: dict[int, int] = {}
    for component in nx.strongly_connected_components(grouped):
        leader.update(dict.fromkeys(component, min(component)))
    for call_number, group in group_of.items():
        members[leader[group]].append(call_number)
    merged = nx.DiGraph()
    merged.add_nodes_from(members)
    merged.add_edges_from((leader[a], leader[b]) for a, b in grouped.edges if leader[a] != leader[b])
    last = {group: max(numbers) for group, numbers in members.items()}
    order = nx.lexicographical_topological_sort(merged, key=last.__getitem__)

    by_number = {c.call: c for c in calls}
    views = _Views(trace, costs)
    nodes = [
        _node(i, own, views.time_s(own), trace, costs, storage_of, temporary, creator)
        for i, own in enumerate([by_number[n] for n in sorted(members[group])] for group in order)
    ]
    return Folded(_mark_once(nodes), [s.nbytes for s in trace.storages], temporary)


class _Views:
    """Assigns the time of making a view to the first node that reads it; a node that runs again makes its views again.

    An operator's views cost the same, whatever their shapes and offsets: they do no work, and equal parts of a model
    (`x[:, 7]` and `x[:, 8]` are distinct calls) stay equal.
    """

    def __init__(self, trace: TraceTables, costs: Mapping[str, Cost]) -> None:
        views = [c for c in trace.calls if c.is_view]
        if missing := [c for c in views if c.signature not in costs]:
            raise _lacking(missing[0])
        self._maker = {v: c for c in views for v in c.returns if v >= 0}
        self._made: set[int] = set()
        times: dict[tuple[str, int], list[float]] = defaultdict(list)
        for call in views:
            times[_kind(call)].append(costs[call.signature].time_s)
        self._time_s = {kind: statistics.fmean(found) for kind, found in times.items()}

    def time_s(self, calls: Iterable[Call]) -> float:
        """Return the time of making views that `calls` read and no earlier node did, and the views that those need."""
        time_s = 0.0
        waiting = [v for c in calls for v in c.reads]
        while waiting:
            call = self._maker.get(waiting.pop())
            if call is not None and call.call not in self._made:
                self._made.add(call.call)
                time_s += self._time_s[_kind(call)]
                waiting += call.reads
        return time_s


def _kind(view: Call) -> tuple[str, int]:
    """Return a view's operator and how many views it makes."""
    return view.target, len(view.returns)


def _lacking(call: Call) -> TableError:
    return TableError(f"The costs lack call {call.target} ({call.signature}): run the profile stage.")


def _join_sole_readers(calls: list[Call], storage_of: list[int], creator: Mapping[int, int], joined: nx.Graph) -> None:
    """Join a call that alone reads what a random call drew to that call: the draw itself is never worth keeping."""
    readers: dict[int, set[int]] = defaultdict(set)
    # Both must be of the same phase: fused attention is random, and its backward alone reads its statistics.
    phase_of = {c.call: c.phase for c in calls}
    for call in calls:
        for storage in {storage_of[v] for v in call.reads}:
            readers[storage].add(call.call)
    for call in calls:
        if call.is_random:
            for storage in {storage_of[v] for v in call.returns if v >= 0} & creator.keys():
                others = readers[storage] - {call.call}
                if len(others) == 1 and phase_of[min(others)] == call.phase:
                    joined.add_edge(call.call, others.pop())


def _order_persistent(calls: list[Call], storage_of: list[int], temporary: frozenset[int], graph: nx.DiGraph) -> None:
    """Keep the order of reads and writes of a persistent storage."""
    last_write: dict[int, int] = {}
    reads_since: dict[int, list[int]] = defaultdict(list)
    for call in calls:
        written = {s for s in call.mutates if s not in temporary}
        for storage in {storage_of[v] for v in call.reads} - temporary:
            if storage in last_write:
                graph.add_edge(last_write[storage], call.call)
            reads_since[storage].append(call.call)
        for storage in written:
            for reader in reads_since.pop(storage, []):
                if reader != call.call:
                    graph.add_edge(reader, call.call)
            if storage in last_write:
                graph.add_edge(last_write[storage], call.call)
            last_write[storage] = call.call


def _order_random(calls: list[Call], graph: nx.DiGraph) -> None:
    """Keep eager's order of first executions that draw from the global generator."""
    random = [c.call for c in calls if c.is_random]
    graph.add_edges_from(pairwise(random))


def _node(
    number: int,
    calls: list[Call],
    views_s: float,
    trace: TraceTables,
    costs: Mapping[str, Cost],
    storage_of: list[int],
    temporary: frozenset[int],
    creator: Mapping[int, int],
) -> ComputeNode:
    if missing := [c for c in calls if c.signature not in costs]:
        raise _lacking(missing[0])
    members = {c.call for c in calls}
    creates = {s for c in calls for v in c.returns if v >= 0 and creator.get(s := storage_of[v]) in members}
    mutates = {s for c in calls for s in c.mutates} - temporary
    found = [costs[c.signature] for c in calls]
    label = max(calls, key=lambda c: costs[c.signature].time_s)
    phases = {c.phase for c in calls}
    return ComputeNode(
        node=number,
        calls=tuple(c.call for c in calls),
        reads=tuple(sorted({storage_of[v] for c in calls for v in c.reads} - creates)),
        creates=tuple(sorted(creates)),
        mutates=tuple(sorted(mutates)),
        phase="update" if "update" in phases else "backward" if "backward" in phases else "forward",
        block=SHARED,
        once=changes_for_good(calls, temporary),
        random=any(c.is_random for c in calls),
        time_s=max(sum(c.time_s for c in found) + views_s, 1e-7),
        workspace_bytes=max(c.workspace_bytes for c in found),
        flagged_bytes=flagged_bytes(calls, found),
        copied_bytes=max(c.copied_bytes for c in found),
        estimated=any(c.source != "measured" for c in found),
        name=f"{label.target.split('.')[1]} {label.module or trace.meta.model}",
        takes=takes_of(calls, trace),
        collective=any(c.target in COLLECTIVES for c in calls),
    )


def flagged_bytes(calls: Sequence[Call], costs: Sequence[Cost]) -> tuple[int, ...]:
    """Return the workspace of a node by the flags of its calls; nothing where it depends on none, as far as is known.

    Args:
        calls: the calls of the node.
        costs: the cost of each.
    """
    if not any(cost.flagged_bytes for cost in costs):
        return ()
    counts = [flag_count(call.target, call.arguments) for call in calls]
    return together(
        [cost.flagged_bytes or (cost.workspace_bytes,) * (1 << n) for cost, n in zip(costs, counts, strict=True)]
    )


def _mark_once(nodes: list[ComputeNode]) -> list[ComputeNode]:
    """Let a node run only once that reads a persistent storage which a later node changes."""
    late = overtaken(nodes)
    return [replace(node, once=True) if node.node in late else node for node in nodes]
