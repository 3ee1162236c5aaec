"""The fastest schedule of a tiny step, by trying all of them: which node to run next, and what to free before it."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import combinations

from stowage.stages.formulations.cuts.step_graph import Bits, StepGraph, both_lanes_s

State = tuple[Bits, Bits]
"""What is in memory, and which nodes have run."""

Seconds = tuple[float, float]
"""Of what computes, and of what ranks exchange, which may run beside it."""


@dataclass(frozen=True)
class Fastest:
    """A schedule that no other beats: its time, the longer of both lanes, and its nodes in the order of their runs."""

    time_s: float
    order: tuple[int, ...]


def fastest(step: StepGraph, budget: int) -> float:
    """The least time of any legal schedule within the budget; infinite where there is none."""
    found = fastest_schedule(step, budget)
    return found.time_s if found is not None else math.inf


def fastest_schedule(step: StepGraph, budget: int) -> Fastest | None:
    """One that takes least of all legal schedules within the budget; None where there is none.

    What is written in place counts as read: a schedule may do more here than the real step allows. Only schedules that
    keep as much as there is room for are tried: what is in memory can be freed whenever room is needed.
    """
    search = _Search(step, budget)
    start: State = (_bits(step.waiting), 0)
    best: dict[State, list[Seconds]] = {start: [(0.0, 0.0)]}
    heap: list[tuple[float, int, Seconds, State, tuple[int, ...]]] = [(step.once_s, 0, (0.0, 0.0), start, ())]
    count = 0
    while heap:
        _, _, taken, state, order = heapq.heappop(heap)
        if taken not in best[state]:
            continue
        if search.is_done(state):
            return Fastest(both_lanes_s(*taken), order)
        for node, reached in search.next(state):
            total = _sum(taken, search.seconds[node])
            known = best.get(reached, [])
            if any(k[0] <= total[0] and k[1] <= total[1] for k in known):
                continue
            best[reached] = [*(k for k in known if k[0] < total[0] or k[1] < total[1]), total]
            count += 1
            at_least = both_lanes_s(*_sum(total, search.left(reached[1])))
            heapq.heappush(heap, (at_least, count, total, reached, (*order, node)))
    return None


def _bits(numbers: Iterable[int]) -> Bits:
    return sum(1 << n for n in set(numbers))


def _sum(one: Seconds, other: Seconds) -> Seconds:
    return one[0] + other[0], one[1] + other[1]


class _Search:
    """What may come next in schedules of a step."""

    def __init__(self, step: StepGraph, budget: int) -> None:
        self._step, self._budget = step, budget
        nodes = step.nodes
        self.seconds = [(0.0, n.time_s) if n.collective else (n.time_s, 0.0) for n in nodes]
        self._all, self._once = _bits(n.node for n in nodes), _bits(step.once)
        self._reads = [_bits(reads) for reads in step.reads]
        self._own = [_bits((*reads, *n.creates)) for n, reads in zip(nodes, step.reads, strict=True)]
        self._after = [_bits(step.after.get(n.node, ())) for n in nodes]
        """What runs before the node, and not after it."""
        self._never_before = [_bits(m for m, earlier in step.after.items() if n.node in earlier) for n in nodes]
        later_draws = [_bits(m.node for m in nodes[n.node + 1 :] if m.random) if n.random else 0 for n in nodes]
        self._never_before_first = later_draws
        self._stays, self._readers = _bits(step.stays), {s: _bits(r) for s, r in step.readers.items()}
        self._most = cache(self._fitting)
        self.left = cache(self._left)

    def is_done(self, state: State) -> bool:
        """Whether everything has run, and what must remain is there."""
        live, ran = state
        return ran == self._all and not self._stays & ~live

    def _left(self, ran: Bits) -> Seconds:
        """The time of all that has not run."""
        computing_s, exchanging_s = 0.0, 0.0
        for node, (own_s, together_s) in enumerate(self.seconds):
            if not ran >> node & 1:
                computing_s, exchanging_s = computing_s + own_s, exchanging_s + together_s
        return computing_s, exchanging_s

    def next(self, state: State) -> Iterator[tuple[int, State]]:
        """Each run that may be the next, with what it leads to."""
        live, ran = state
        for node, reads in enumerate(self._reads):
            if reads & ~live or self._after[node] & ~ran or self._never_before[node] & ran:
                continue
            if (self._once if ran >> node & 1 else 0) >> node & 1:
                continue
            if not ran >> node & 1 and self._never_before_first[node] & ran:
                continue
            after = ran | 1 << node
            for kept in self._kept(node, live):
                yield node, (self._useful(kept, after), after)

    def _kept(self, node: int, live: Bits) -> Iterator[Bits]:
        """What may be in memory behind a run: as much as there is room for during it, whichever values that are."""
        own, step = self._own[node], self._step
        room = self._budget - step.base_bytes - step.nodes[node].workspace_bytes - self._nbytes(own)
        for over in (None, *step.nodes[node].takes):
            left = room + (step.nbytes[over] if over is not None else 0)
            if left >= 0:
                freed = 1 << over if over is not None else 0
                yield from ((own | others) & ~freed for others in self._most(live & ~own, left))

    def _nbytes(self, values: Bits) -> int:
        return sum(self._step.nbytes[s] for s in self._readers if values >> s & 1)

    def _fitting(self, values: Bits, room: int) -> list[Bits]:
        """The sets of values that fit, and beside which no other one does."""
        nbytes = {s: self._step.nbytes[s] for s in self._readers if values >> s & 1}
        found = []
        for count in range(len(nbytes), -1, -1):
            for chosen in combinations(nbytes, count):
                left = room - sum(nbytes[s] for s in chosen)
                if left >= 0 and all(size > left for s, size in nbytes.items() if s not in chosen):
                    found.append(_bits(chosen))
        return found

    def _useful(self, live: Bits, ran: Bits) -> Bits:
        """What of it anything may still read, or must remain."""
        done = ran & self._once
        unread = _bits(s for s, readers in self._readers.items() if live >> s & 1 and not readers & ~done)
        return live & ~(unread & ~self._stays)
