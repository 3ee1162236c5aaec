"""The fastest schedule of a tiny step, by trying all of them: which node to run next, and what to free."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from itertools import chain, combinations

from stowage.stages.formulations.cuts.step_graph import StepGraph

State = tuple[frozenset[int], frozenset[int], int]
"""What is in memory, which nodes have run, and the last node that drew for the first time."""


def fastest(step: StepGraph, budget: int) -> float:
    """The least time of any legal schedule within the budget; infinite where there is none."""
    start: State = (step.waiting, frozenset(), -1)
    best = {start: 0.0}
    heap = [(0.0, 0, start)]
    count = 0
    while heap:
        time_s, _, state = heapq.heappop(heap)
        if time_s > best[state]:
            continue
        live, ran, _ = state
        if len(ran) == len(step.nodes) and step.stays <= live:
            return time_s
        for more_s, after in _next(step, budget, state):
            total = time_s + more_s
            if total < best.get(after, math.inf):
                best[after] = total
                count += 1
                heapq.heappush(heap, (total, count, after))
    return math.inf


def _next(step: StepGraph, budget: int, state: State) -> Iterator[tuple[float, State]]:
    live, ran, drawn = state
    for node in step.nodes:
        first = node.node not in ran
        if not live.issuperset(step.reads[node.node]) or not live.isdisjoint(node.creates):
            continue
        if not first and node.node in step.once:
            continue
        if first and node.random and node.node < drawn:
            continue
        during = live | set(node.creates)
        need = step.base_bytes + sum(step.nbytes[s] for s in during) + node.workspace_bytes
        for freed in _subsets(sorted(during)):
            taken = max((step.nbytes[s] for s in node.takes if s in freed), default=0)
            if need - taken <= budget:
                newest = max(drawn, node.node) if node.random else drawn
                yield node.time_s, (during - freed, ran | {node.node}, newest)


def _subsets(values: Sequence[int]) -> Iterator[frozenset[int]]:
    found = chain.from_iterable(combinations(values, k) for k in range(len(values) + 1))
    return (frozenset(s) for s in found)
