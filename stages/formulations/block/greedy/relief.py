"""Lowers the peak of a schedule: adds cuts to a choice until both budgets hold, cheapest bytes first.

One pass walks the timeline with the memory that would be in use; wherever that exceeds its budget, it drops the idle
copy that is cheapest to make again per byte (and per stage of idleness, to the power `foresight`). Making copies again
takes memory too, so passes repeat on the schedule that follows, until the budgets hold or nothing idle is left.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from stowage.stages.formulations.block.greedy.lazy import Candidate, candidate_of, with_cuts
from stowage.stages.formulations.block.staged_order import StagedGraph

_MOST_PASSES = 40
_DEPTH = 64


@dataclass(frozen=True, order=True)
class Idle:
    """A forward node's copy between two uses.

    Attributes:
        node: the node.
        after, until: positions in the timeline of the use before and of the use after.
        stage: stage of the use before, where the cut is made.
        next_stage: stage of the use after.
        nbytes: bytes that a cut frees.
    """

    node: int
    after: int
    until: int
    stage: int
    next_stage: int
    nbytes: int


def relieve(
    graph: StagedGraph,
    start: Candidate,
    peak_bytes: int,
    save_bytes: int,
    *,
    foresight: float = 0.5,
    uncut: frozenset[int] = frozenset(),
) -> Candidate | None:
    """Return a candidate within both budgets that grows out of `start`, or None where the rule finds none.

    Nodes in `uncut` get no new cuts.
    """
    current = start
    for _ in range(_MOST_PASSES):
        if current.cost.within(peak_bytes, save_bytes):
            return current
        cuts = _one_pass(graph, current, peak_bytes, save_bytes, foresight, uncut)
        if not cuts:
            return None
        grown = candidate_of(graph, with_cuts(current.choice, cuts))
        if grown.executions == current.executions:
            return None
        current = grown
    return None


def polish(graph: StagedGraph, found: Candidate, peak_bytes: int, save_bytes: int, tries: int) -> Candidate:
    """Keep the nodes that are most expensive to make again and relieve the peak without them, while that is faster."""
    uncut: frozenset[int] = frozenset()
    tried: set[int] = set()
    for _ in range(tries):
        again = [k for k in found.choice if len(found.executions[k]) > 1 and k not in tried]
        if not again:
            break
        k = max(again, key=lambda k: (graph.nodes[k].time_s * (len(found.executions[k]) - 1), -k))
        tried.add(k)
        trial = candidate_of(graph, {other: cuts for other, cuts in found.choice.items() if other != k})
        grown = relieve(graph, trial, peak_bytes, save_bytes, uncut=uncut | {k})
        if grown is not None and grown.cost.time_s < found.cost.time_s:
            found, uncut = grown, uncut | {k}
    return found


def idle_copies(graph: StagedGraph, current: Candidate) -> list[Idle]:
    """Return every stretch in which a forward node's outputs are unused and could be dropped, in order of `after`."""
    found: list[Idle] = []
    last: dict[int, int] = {}
    stretch: dict[tuple[int, int, int], int] = {}
    events = current.line.events
    for position, (_, r) in enumerate(events):
        for a in graph.nodes[r].reads:
            k = graph.creator[a]
            before = last[a]
            if k < graph.loss and not graph.nodes[k].once and events[before][0] < events[position][0]:
                key = (k, before, position)
                stretch[key] = stretch.get(key, 0) + graph.nbytes[a]
            last[a] = position
        for a in graph.nodes[r].creates:
            last[a] = position
    found = [Idle(k, b, u, events[b][0], events[u][0], size) for (k, b, u), size in stretch.items() if size]
    return sorted(found, key=lambda idle: (idle.after, idle.node, idle.until))


def _one_pass(
    graph: StagedGraph,
    current: Candidate,
    peak_bytes: int,
    save_bytes: int,
    foresight: float,
    uncut: frozenset[int],
) -> list[tuple[int, int]]:
    """Return cuts that would bring every moment of the timeline within budget if making things again took no memory."""
    events, nbytes = current.line.events, graph.nbytes
    starting: dict[int, list[Idle]] = {}
    for idle in idle_copies(graph, current):
        if idle.node in uncut:
            continue
        starting.setdefault(idle.after, []).append(idle)
    heap: list[tuple[float, Idle]] = []
    returning: dict[int, int] = {}
    cuts: list[tuple[int, int]] = []
    used, spans = 0, _spans(graph, current)
    seconds: dict[tuple[int, int], float] = {}
    for position, (_, k) in enumerate(events):
        node = graph.nodes[k]
        # A dropped copy takes memory again from its next use on.
        used += returning.pop(position, 0)
        if k == graph.loss:
            used = _give_up(heap, used, save_bytes, position, returning, cuts)
        used += sum(nbytes[a] for a in node.creates)
        used = _give_up(heap, used, peak_bytes - node.workspace_bytes, position, returning, cuts)
        used -= sum(nbytes[a] for a in current.line.freed[position])
        for idle in starting.get(position, ()):
            again = (idle.node, idle.next_stage)
            if again not in seconds:
                seconds[again] = _seconds_again(graph, spans, *again)
            price = seconds[again] / (idle.nbytes * (idle.until - idle.after) ** foresight)
            heapq.heappush(heap, (price, idle))
    return cuts


def _give_up(
    heap: list[tuple[float, Idle]],
    used: int,
    limit: int,
    position: int,
    returning: dict[int, int],
    cuts: list[tuple[int, int]],
) -> int:
    """Drop the cheapest idle copies until `used` is within `limit`; return the bytes in use then."""
    while used > limit and heap:
        _, idle = heapq.heappop(heap)
        if idle.until > position:
            cuts.append((idle.node, idle.stage))
            returning[idle.until] = returning.get(idle.until, 0) + idle.nbytes
            used -= idle.nbytes
    return used


Spans = dict[int, list[tuple[int, int]]]
"""First and last stage of each copy of each allocation, ascending."""


def _spans(graph: StagedGraph, current: Candidate) -> Spans:
    made: dict[int, int] = {}
    spans: Spans = {a: [] for a in range(len(graph.nbytes))}
    for (stage, k), freed in zip(current.line.events, current.line.freed, strict=True):
        made.update(dict.fromkeys(graph.nodes[k].creates, stage))
        for a in freed:
            spans[a].append((made[a], stage))
    for a in graph.block.outgoing:
        spans[a].append((made[a], len(graph.nodes)))
    return spans


def _seconds_again(graph: StagedGraph, spans: Spans, node: int, stage: int) -> float:
    """Return the time to make a node's outputs again at a stage: its own and that of ancestors not in memory then."""
    total, seen, stack = 0.0, {node}, [node]
    while stack and len(seen) <= _DEPTH:
        k = stack.pop()
        total += graph.nodes[k].time_s
        for a in graph.nodes[k].reads:
            c = graph.creator[a]
            if c not in seen and not any(first <= stage <= last for first, last in spans[a]):
                seen.add(c)
                stack.append(c)
    return total
