"""Exhaustive search for the fastest schedule of a tiny block. Shares no code with the formulations.

`staged` follows Checkmate's staged order (every node's first execution in the given order, each node at most once a
stage, ascending); without it any order of executions is allowed. Any order can only be faster or equal.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from stowage.stages.ir.block import BlockGraph

State = tuple[int, int, int, int]
"""Live allocations as bits, executed nodes as bits (loss is bit n), stage, next node in the stage."""


def fastest(graph: BlockGraph, peak: int, save: int, *, staged: bool = True) -> float | None:
    """Least total time within both budgets, or None where nothing fits."""
    search = _Search(graph, peak, save, staged)
    start: State = (0, 0, 0, 0)
    best: dict[State, float] = {start: 0.0}
    queue: list[tuple[float, State]] = [(0.0, start)]
    while queue:
        time_s, state = heapq.heappop(queue)
        if best[state] < time_s:
            continue
        if search.done(state):
            return time_s
        for extra, following in search.transfers(state):
            total = time_s + extra
            if total < best.get(following, float("inf")):
                best[following] = total
                heapq.heappush(queue, (total, following))
    return None


class _Search:
    def __init__(self, graph: BlockGraph, peak: int, save: int, staged: bool) -> None:
        self.graph, self.peak, self.save, self.staged = graph, peak, save, staged
        n, loss = len(graph.nodes), graph.forward_count
        self.order = [*range(loss), n, *range(loss, n)]
        self.reads = [_bits(node.reads) for node in graph.nodes] + [_bits(graph.output)]
        self.makes = [_bits(node.creates) for node in graph.nodes] + [_bits(graph.incoming)]
        self.time = [node.time_s for node in graph.nodes] + [0.0]
        self.work = [node.workspace_bytes for node in graph.nodes] + [0]
        self.once = [node.once for node in graph.nodes] + [True]
        self.all = (1 << (n + 1)) - 1
        self.goal = _bits(graph.outgoing)

    def nbytes(self, live: int) -> int:
        return sum(a.nbytes for i, a in enumerate(self.graph.allocations) if live >> i & 1)

    def done(self, state: State) -> bool:
        live, executed, _, _ = state
        return executed == self.all and live == self.goal

    def transfers(self, state: State) -> Iterator[tuple[float, State]]:
        live, executed, stage, position = state
        for i in range(len(self.graph.allocations)):
            if live >> i & 1:
                yield 0.0, (live & ~(1 << i), executed, stage, position)
        if self.staged:
            if stage == len(self.order):
                return
            if position < stage:
                yield 0.0, (live, executed, stage, position + 1)
            node = self.order[position]
            after = (stage + 1, 0) if position == stage else (stage, position + 1)
            candidates = [(node, after)]
        else:
            candidates = [(node, (0, 0)) for node in self.order]
        for node, (next_stage, next_position) in candidates:
            ran = bool(executed >> node & 1)
            loss = len(self.graph.nodes)
            if (ran and self.once[node]) or self.reads[node] & ~live or self.makes[node] & live:
                continue
            if not self.staged and self.graph.forward_count <= node < loss and not executed >> loss & 1:
                continue
            if node == loss and self.nbytes(live) > self.save:
                continue
            present = live | self.makes[node]
            if self.nbytes(present) + self.work[node] > self.peak:
                continue
            yield self.time[node], (present, executed | 1 << node, next_stage, next_position)


def _bits(indices: tuple[int, ...]) -> int:
    return sum(1 << i for i in indices)
