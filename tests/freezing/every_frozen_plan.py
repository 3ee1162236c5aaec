"""The plan with the least mean time of a tiny step that freezes, by trying all that fit under every mask.

It goes through the rows from the last to the first: the guard of a row is known from what reads its results later.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from stowage.stages.formulations.cuts.step_graph import StepGraph
from stowage.stages.freezing.owners import Owners
from stowage.stages.freezing.times import chance
from stowage.stages.ir.freezable import Freezable
from stowage.stages.ir.units import ALWAYS, bit, joined
from stowage.stages.rewrite import Way

State = tuple[frozenset[int], frozenset[tuple[int, int]]]
"""The nodes whose first run is among the rows so far, and values that these read, each with the guard of what does."""


@dataclass(frozen=True)
class FastestFrozen:
    """A plan that no other beats: its mean time, and its nodes in the order of their runs."""

    mean_s: float
    order: tuple[int, ...]


def fastest_frozen(way: Way, freezable: Freezable, budget: int, most_s: float = math.inf) -> FastestFrozen | None:
    """One that takes least on average of all that fit; None where none does that takes at most so long."""
    search = _Backwards(way, freezable, budget)
    best: dict[State, float] = {search.last: 0.0}
    heap: list[tuple[float, int, float, State, tuple[int, ...]]] = [(0.0, 0, 0.0, search.last, ())]
    count = 0
    while heap:
        _, _, mean_s, state, order = heapq.heappop(heap)
        if mean_s > best[state]:
            continue
        if search.is_whole(state):
            return FastestFrozen(mean_s, order)
        for node, share, before in search.before(state):
            total_s = mean_s + share * way.nodes[node].time_s
            if total_s < best.get(before, math.inf):
                best[before] = total_s
                count += 1
                at_least_s = total_s + search.left_s(before)
                if at_least_s <= most_s:
                    heapq.heappush(heap, (at_least_s, -count, total_s, before, (node, *order)))
    return None


class _Backwards:
    """What may come right before some rows of a plan."""

    def __init__(self, way: Way, freezable: Freezable, budget: int) -> None:
        self._nodes, self._graph = way.nodes, StepGraph.of(way.trace, way.nodes)
        self._freezable, self._budget = freezable, budget
        self._owners = Owners(way.trace, way.nodes, freezable.units)
        self._masks = [
            ALWAYS | sum(map(bit, chosen)) for chosen in combinations(range(len(freezable.units)), freezable.active)
        ]
        self.last: State = (frozenset(), frozenset(self._owners.kept.items()))

    def is_whole(self, state: State) -> bool:
        """Whether every node has its first run, and nothing is missing before these rows."""
        return len(state[0]) == len(self._nodes) and not state[1]

    def left_s(self, state: State) -> float:
        """The least that the rows before take: each node once more under all that reads from it, if anything does."""
        begun, read = state
        needed, found_s = dict(read), 0.0
        for node in reversed(self._nodes):
            first = node.node not in begun
            later = joined(*(needed.get(s, 0) for s in node.creates))
            guard = self._guard(node.node, later, first)
            if guard:
                found_s += self._share(guard) * node.time_s
                for s in self._graph.reads[node.node]:
                    needed[s] = joined(guard, needed.get(s, 0))
        return found_s

    def _share(self, guard: int) -> float:
        return chance(guard, len(self._freezable.units), self._freezable.active)

    def before(self, state: State) -> Iterator[tuple[int, float, State]]:
        """Each run that may come right before, with the share of masks under which it does, and what is read then."""
        begun, read = state
        needed = dict(read)
        for node in self._nodes:
            if node.node in begun or not begun.issuperset(self._not_before(node.node)):
                continue
            later = joined(*(needed.get(s, 0) for s in node.creates))
            for first in (True, False):
                guard = self._guard(node.node, later, first)
                if not guard or (not first and node.once):
                    continue  # a run that nothing reads
                rest = {s: g for s, g in needed.items() if s not in node.creates}
                rest |= {s: joined(guard, rest.get(s, 0)) for s in self._graph.reads[node.node]}
                if self._fits(node.node, guard, rest):
                    yield (
                        node.node,
                        self._share(guard),
                        (begun | {node.node} if first else begun, frozenset(rest.items())),
                    )

    def _not_before(self, node: int) -> Sequence[int]:
        """What changes a weight that a node uses as it was: it must be among the rows that follow."""
        return [n for n, earlier in self._graph.after.items() if node in earlier]

    def _guard(self, number: int, later: int, first: bool) -> int:
        node = self._nodes[number]
        if first and node.phase == "forward" and (not later or node.mutates or node.once):
            return ALWAYS
        return joined(self._owners.guard(node) if first else 0, later)

    def _fits(self, number: int, guard: int, live: dict[int, int]) -> bool:
        """Whether the row fits under every mask under which it runs, beside what is read from before it."""
        node, graph = self._nodes[number], self._graph
        own = graph.base_bytes + sum(graph.nbytes[s] for s in node.creates) + node.workspace_bytes
        return all(
            own + sum(graph.nbytes[s] for s, g in live.items() if g & mask) <= self._budget
            for mask in self._masks
            if guard & mask
        )
