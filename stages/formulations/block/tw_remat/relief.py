"""Lowers the peak of an order: drops what is in memory there and is not read, and makes it again before it is read.

It is the counterpart of `any_order.retain`; `greedy/relief.py` does the same for choices in the staged order.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence

from stowage.stages.formulations.block.greedy.lazy import Candidate
from stowage.stages.formulations.block.staged_order import StagedGraph, Timeline
from stowage.stages.formulations.block.tw_remat.any_order import candidate_of_order, order_of, useful

# Most orders that are tried at each peak, and most nodes that run again for one of them.
_WAYS = 6
_MOST_NODES = 8


def relieved(
    graph: StagedGraph, start: Candidate, repeatable: Callable[[int], bool], rounds: int
) -> Iterator[Candidate]:
    """Yield candidates with ever lower peaks, or fewer executions at the peak.

    Args:
        graph: the block.
        start: the candidate to begin with.
        repeatable: nodes that may run again.
        rounds: the most candidates.
    """
    current = start
    for _ in range(rounds):
        height, times, position = _peak(graph, current.line)
        ways = [useful(graph, order) for order in _ways(graph, current, position, repeatable)]
        candidates = [candidate_of_order(graph, order) for order in ways]
        ranked = sorted((*_peak(graph, c.line)[:2], c.cost.time_s, i) for i, c in enumerate(candidates))
        if not ranked or ranked[0][:2] >= (height, times):
            return
        current = candidates[ranked[0][3]]
        yield current


def _peak(graph: StagedGraph, line: Timeline) -> tuple[int, int, int]:
    """Return the bytes at the peak, the number of executions that reach it, and the first of them."""
    used, height, times, first = 0, -1, 0, 0
    for position, ((_, k), freed) in enumerate(zip(line.events, line.freed, strict=True)):
        used += sum(graph.nbytes[a] for a in graph.nodes[k].creates)
        now = used + graph.nodes[k].workspace_bytes
        if now > height:
            height, times, first = now, 0, position
        times += now == height
        used -= sum(graph.nbytes[a] for a in freed)
    return height, times, first


def _ways(graph: StagedGraph, current: Candidate, peak: int, repeatable: Callable[[int], bool]) -> Iterator[list[int]]:
    """Yield orders in which something in memory at the peak is made again after it, the cheapest per byte first."""
    order = order_of(current)
    copies = _Copies(graph, current.line)
    idle = [a for a in range(len(graph.nbytes)) if copies.in_memory(a, peak) and graph.nbytes[a]]
    waiting = {a for a in idle if repeatable(graph.creator[a])}.difference(graph.nodes[order[peak]].reads)
    next_use = _next_uses(graph, order, peak, waiting)
    found = []
    for a, before in sorted(next_use.items()):
        again = _again(graph, graph.creator[a], copies, before, repeatable)
        if again:
            found.append((sum(graph.nodes[k].time_s for k in again) / graph.nbytes[a], a, again))
    for _, a, again in sorted(found)[:_WAYS]:
        yield [*order[: next_use[a]], *again, *order[next_use[a] :]]


class _Copies:
    """Finds whether an allocation is in memory at a position."""

    def __init__(self, graph: StagedGraph, line: Timeline) -> None:
        self._made: dict[int, list[int]] = {}
        self._freed: dict[int, list[int]] = {}
        for position, ((_, k), freed) in enumerate(zip(line.events, line.freed, strict=True)):
            for a in graph.nodes[k].creates:
                self._made.setdefault(a, []).append(position)
            for a in freed:
                self._freed.setdefault(a, []).append(position)

    def in_memory(self, a: int, before: int) -> bool:
        """Say whether there is a copy right before a position."""
        copy = bisect_left(self._made.get(a, []), before) - 1
        freed = self._freed.get(a, [])
        return copy >= 0 and (copy == len(freed) or freed[copy] >= before)


def _next_uses(graph: StagedGraph, order: Sequence[int], after: int, wanted: set[int]) -> dict[int, int]:
    """Return the first read of each allocation after a position, unless it is made again before."""
    found: dict[int, int] = {}
    left = set(wanted)
    for position in range(after + 1, len(order)):
        node = graph.nodes[order[position]]
        for a in left.intersection(node.reads):
            found[a] = position
        left.difference_update(node.reads, node.creates)
        if not left:
            break
    return found


def _again(graph: StagedGraph, node: int, copies: _Copies, before: int, repeatable: Callable[[int], bool]) -> list[int]:
    """Return `node` and its ancestors not in memory before a position, ascending; nothing where they are too many."""
    found, stack = {node}, [node]
    while stack and len(found) <= _MOST_NODES:
        for a in graph.nodes[stack.pop()].reads:
            maker = graph.creator[a]
            if maker not in found and repeatable(maker) and not copies.in_memory(a, before):
                found.add(maker)
                stack.append(maker)
    return sorted(found) if len(found) <= _MOST_NODES else []
