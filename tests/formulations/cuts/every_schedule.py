"""The fastest schedule of a tiny step, by trying all of them: which node to run next, and what to free."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from itertools import chain, combinations

from stowage.stages.formulations.cuts.step_graph import StepGraph

State = tuple[frozenset[int], frozenset[int], int]
"""What is in memory, which nodes have run, and the last node that drew for the first time."""


Seconds = tuple[float, float]
"""Of what computes, and of what ranks exchange, which may run beside it."""


def fastest(step: StepGraph, budget: int) -> float:
    """The least time of any legal schedule within the budget, the longer of both lanes; infinite where there is none.

    What is written in place counts as read: a schedule may do more here than the real step allows.
    """
    start: State = (step.waiting, frozenset(), -1)
    best: dict[State, list[Seconds]] = {start: [(0.0, 0.0)]}
    heap: list[tuple[float, int, Seconds, State]] = [(0.0, 0, (0.0, 0.0), start)]
    count = 0
    while heap:
        time_s, _, taken, state = heapq.heappop(heap)
        if taken not in best[state]:
            continue
        live, ran, _ = state
        if len(ran) == len(step.nodes) and step.stays <= live:
            return time_s
        for more, after in _next(step, budget, state):
            total = taken[0] + more[0], taken[1] + more[1]
            known = best.get(after, [])
            if any(k[0] <= total[0] and k[1] <= total[1] for k in known):
                continue
            best[after] = [*(k for k in known if k[0] < total[0] or k[1] < total[1]), total]
            count += 1
            heapq.heappush(heap, (max(total), count, total, after))
    return math.inf


def _next(step: StepGraph, budget: int, state: State) -> Iterator[tuple[Seconds, State]]:
    live, ran, drawn = state
    for node in step.nodes:
        first = node.node not in ran
        if not live.issuperset(step.reads[node.node]) or not live.isdisjoint(node.creates):
            continue
        if not first and node.node in step.once:
            continue
        if first and node.random and node.node < drawn:
            continue
        if not ran.issuperset(step.after.get(node.node, ())):
            continue
        if any(node.node in step.after.get(other, ()) for other in ran):
            continue  # what it uses is no longer what it was
        during = live | set(node.creates)
        need = step.base_bytes + sum(step.nbytes[s] for s in during) + node.workspace_bytes
        for freed in _subsets(sorted(during)):
            taken = max((step.nbytes[s] for s in node.takes if s in freed), default=0)
            if need - taken <= budget:
                newest = max(drawn, node.node) if node.random else drawn
                seconds = (0.0, node.time_s) if node.collective else (node.time_s, 0.0)
                yield seconds, (during - freed, ran | {node.node}, newest)


def _subsets(values: Sequence[int]) -> Iterator[frozenset[int]]:
    found = chain.from_iterable(combinations(values, k) for k in range(len(values) + 1))
    return (frozenset(s) for s in found)
