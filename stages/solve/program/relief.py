"""Repairs an order that exceeds the budget a little: makes values again, or moves runs, where it does."""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from stowage.stages.solve.program.chain import Execution
from stowage.stages.solve.program.evicting import eviction_step
from stowage.stages.solve.program.program import StepProgram

TRIED_RUNS = 4000
"""Runs in all repairs of one place that are tried: those that promise most memory for their time."""

MOST_ABOVE = 0.05
"""Share of the room of all runs by which an order may exceed the budget, and be repaired."""

LEAST_TRIED = 3
"""Repairs of one place that are tried however long the order is."""

VALUES = 4
"""Values of one place that are looked at for each repair that is tried."""

DROPPED = (1, 4, 16, 64)
"""How many values one repair drops at most, each made of the one before: a part of a long chain goes at once."""

AS_CHEAP = 2.0
"""Factor by which what is dropped together with a value may take longer to make, by its bytes."""

ABOUT = 1.2
"""Factor by which what one repair costs, by what it gains, may be above another's that gains less."""

LONGEST_CHAIN = 256
"""Runs at most that one repair adds."""

ROUNDS = 200
"""Repairs of one order at most."""


@dataclass(frozen=True)
class _Repair:
    """Runs that take another place, or that are added.

    Attributes:
        order: the executions.
        time_s: what they take longer.
    """

    order: list[Execution]
    time_s: float


class Relief:
    """Repairs orders of one program.

    Attributes:
        program: the program.
    """

    def __init__(self, program: StepProgram) -> None:
        self.program = program
        self._maker = {s: n.node for n in program.nodes for s in n.creates}
        self._time_s = [n.time_s for n in program.nodes]

    @cached_property
    def _last_again(self) -> Sequence[int]:
        return eviction_step(self.program).last_again

    @cached_property
    def _written(self) -> frozenset[int]:
        """Return what some node changes in place."""
        return frozenset(s for n in self.program.nodes for s in n.mutates)

    def relieved(
        self, executions: Sequence[Execution], budget_bytes: int, most_s: float, until_s: float = math.inf
    ) -> list[Execution] | None:
        """Return an order that fits and takes little longer, or None where none is found.

        Where the order needs most, what is in memory there and read only later is dropped and made again right before
        it is read, or the run moves to where there is more room. Of all repairs the one is taken that lowers what is
        above the budget, summed over the runs, most for its time, until nothing is above it.

        Args:
            executions: a legal order.
            budget_bytes: of the device.
            most_s: seconds that it may take longer.
            until_s: on the clock of `time.monotonic`, when to give up.
        """
        order, spent_s = list(executions), 0.0
        levels = self.program.levels(order)
        first = above = _above(levels, budget_bytes)
        if above > MOST_ABOVE * len(order) * (budget_bytes - self.program.base_bytes):
            return None
        for _ in range(ROUNDS):
            if not above:
                return order
            if spent_s * first > most_s * (first - above):
                return None  # what is left costs more by its bytes than what was cheapest
            best: tuple[_Repair, list[int], int] | None = None
            place = max(range(len(order)), key=lambda p: levels[p])
            for repair in self._repairs(order, levels, place, budget_bytes):
                if time.monotonic() > until_s:
                    return None
                if spent_s + repair.time_s > most_s:
                    continue
                found = self.program.levels(repair.order)
                left = _above(found, budget_bytes)
                if left >= above:
                    continue
                if best is None or _better(repair.time_s, above - left, best[0].time_s, above - best[2]):
                    best = repair, found, left
                    if not repair.time_s:
                        break
            if best is None:
                return None
            repair, levels, above = best
            order, spent_s = repair.order, spent_s + repair.time_s
        return None

    def _repairs(
        self, order: list[Execution], levels: Sequence[int], place: int, budget_bytes: int
    ) -> Iterator[_Repair]:
        """Yield repairs of a place, those that cost nothing first."""
        uses = _Uses(self.program, order)
        yield from self._moved(order, uses, place)
        above = list(accumulate((level > budget_bytes for level in levels), initial=0))
        found: dict[tuple[int, tuple[int, ...]], tuple[float, int]] = {}
        tried = max(LEAST_TRIED, TRIED_RUNS // len(order))

        def promise(found: tuple[int, int]) -> float:
            last, following = uses.around(found[0], place)
            return self._rate(found[0]) / max(above[following] - above[last + 1], 1)

        for storage, before in _some(sorted(uses.across(place), key=promise), VALUES * tried):
            for dropped in DROPPED:
                for keeps in (False, True):
                    chain = self._chain(uses, storage, place, before, dropped, keeps)
                    if chain is None or (before, chain) in found:
                        continue
                    cost_s = sum(self._time_s[n] for n in chain)
                    found[before, chain] = cost_s, self._gain(uses, above, chain, place, before)
        for before, chain in _most_promising(found)[:tried]:
            label = order[before].label
            again = [Execution(n, label) for n in chain]
            repaired = self.program.without_dead([*order[:before], *again, *order[before:]])
            yield _Repair(repaired, self._seconds(repaired) - self._seconds(order))

    def _gain(self, uses: _Uses, above: Sequence[int], chain: Sequence[int], place: int, before: int) -> int:
        """Return the bytes that go, times the runs above the budget that they go from; at least one."""
        found = 0
        for storage in (s for n in chain for s in self.program.nodes[n].creates):
            last, following = uses.around(storage, place)
            if following >= before:
                found += self.program.nbytes[storage] * (above[before] - above[last + 1])
        return max(found, 1)

    def _seconds(self, order: Sequence[Execution]) -> float:
        return sum(self._time_s[e.node] for e in order)

    def _chain(
        self, uses: _Uses, storage: int, place: int, before: int, dropped: int, keeps: bool
    ) -> tuple[int, ...] | None:
        """Return the nodes that make a value again right before a run, or None where that cannot be.

        Args:
            uses: who reads what.
            storage: the value, dropped while the run at `place` is under way.
            place: where room is missing.
            before: the run before which it is made again.
            dropped: how many values that are in memory then are made again, too, if they are as cheap.
            keeps: keep for it what was read for the last time before, instead of making that again too.
        """
        chain: list[int] = []
        done: set[int] = set()
        stack = [(storage, False)]
        dropped -= 1
        rate = AS_CHEAP * self._rate(storage)
        while stack:
            value, ready = stack.pop()
            node = self._maker.get(value, -1)
            if node in done:
                continue
            if ready:
                done.add(node)
                chain.append(node)
                continue
            if node < 0 or not self._may_run(uses, node, before) or len(chain) + len(stack) > LONGEST_CHAIN:
                return None
            stack.append((value, True))
            for read in self.program.reads[node]:
                if read in self.program.nodes[node].creates:
                    continue
                if uses.live(read, before):
                    last, following = uses.around(read, place)
                    if not dropped or not last < place or following < before or self._rate(read) > rate:
                        continue
                    maker = self._maker.get(read, -1)
                    if maker < 0 or not self._may_run(uses, maker, before):
                        continue
                    dropped -= 1
                elif keeps and uses.dies_after(read, place):
                    continue
                stack.append((read, False))
        return tuple(chain)

    def _rate(self, storage: int) -> float:
        """Return the seconds that a byte of a value takes to make."""
        node = self._maker.get(storage, -1)
        return self._time_s[node] / max(self.program.nbytes[storage], 1) if node >= 0 else math.inf

    def _may_run(self, uses: _Uses, node: int, before: int) -> bool:
        """Say whether a node may run again right before a position."""
        last = self._last_again[node]
        return not self.program.nodes[node].once and uses.first.get(last, len(uses.order)) >= before

    def _moved(self, order: list[Execution], uses: _Uses, place: int) -> Iterator[_Repair]:
        """Yield orders in which a run comes right before what reads its results, or right after what it reads."""
        node = self.program.nodes[order[place].node]
        if node.random or node.mutates or node.collective or node.once or not self._written.isdisjoint(node.reads):
            return
        ends = [uses.of[s, place][0] for s in node.creates if len(uses.of[s, place]) > 0]
        # Another copy of the same value, made in between, would be taken for this one.
        again = [p for p in uses.runs[node.node] if p > place][:1]
        later = min([*ends, *again, len(order)]) - 1
        rest = [*order[:place], *order[place + 1 :]]
        if later > place:
            yield _Repair([*rest[:later], order[place], *rest[later:]], 0.0)
        made = [uses.made_before(s, place) for s in self.program.reads[node.node]]
        before = [p for p in uses.runs[node.node] if p < place][-1:]
        # What reads the copy before this one must have done so.
        read = [r[-1] for s in node.creates for p in before if (r := uses.of[s, p])]
        earlier = max([*made, *before, *read, -1]) + 1
        if earlier < place:
            yield _Repair([*rest[:earlier], order[place], *rest[earlier:]], 0.0)


class _Uses:
    """Says who reads the copies of values in an order.

    Attributes:
        order: the order.
        of: the positions that read each copy, by (value, position where it is made); the order's length is its end.
        runs: the positions of each node.
        first: the first of them.
    """

    def __init__(self, program: StepProgram, order: Sequence[Execution]) -> None:
        self.order = order
        self.of: dict[tuple[int, int], list[int]] = {}
        self.runs: dict[int, list[int]] = defaultdict(list)
        self._made: dict[int, list[int]] = defaultdict(list)
        for position, execution in enumerate(order):
            self.runs[execution.node].append(position)
            for storage in program.reads[execution.node]:
                self.of[storage, self._made[storage][-1]].append(position)
            for storage in program.nodes[execution.node].creates:
                self._made[storage].append(position)
                self.of[storage, position] = []
        for storage in program.keep:
            self.of[storage, self._made[storage][-1]].append(len(order))
        self.first = {node: positions[0] for node, positions in self.runs.items()}

    def made_before(self, storage: int, position: int) -> int:
        """Return where the copy that is read at a position was made."""
        made = self._made[storage]
        return made[bisect_right(made, position - 1) - 1]

    def across(self, place: int) -> Iterator[tuple[int, int]]:
        """Yield what is in memory during a run that does not touch it, each with the next run that reads it."""
        for storage in self._made:
            last, following = self.around(storage, place)
            if last < place < following < len(self.order):
                yield storage, following

    def around(self, storage: int, place: int) -> tuple[int, int]:
        """Return the positions at which a copy is touched last before a place, and first at or behind it.

        The former is the place itself, or the latter −1, where no copy of the value is in memory across it.
        """
        made = self._made.get(storage, [])
        at = bisect_right(made, place - 1)
        if not at:
            return place, -1
        reads = self.of[storage, made[at - 1]]
        following = bisect_right(reads, place - 1)
        if following == len(reads):
            return place, -1
        return (reads[following - 1] if following else made[at - 1]), reads[following]

    def live(self, storage: int, position: int) -> bool:
        """Say whether a copy is in memory before a position, and is so still during it."""
        made = self._made.get(storage, [])
        at = bisect_right(made, position - 1)
        return at > 0 and bool(reads := self.of[storage, made[at - 1]]) and reads[-1] >= position

    def dies_after(self, storage: int, place: int) -> bool:
        """Say whether a copy that was made before a place is read at it or behind it."""
        made = self._made.get(storage, [])
        at = bisect_right(made, place - 1)
        return at > 0 and bool(reads := self.of[storage, made[at - 1]]) and reads[-1] >= place


def _some(ordered: Sequence[tuple[int, int]], count: int) -> Sequence[tuple[int, int]]:
    """Return so many of what is in order: one half from its beginning, and the other spread over the rest."""
    if len(ordered) <= count:
        return ordered
    first = count // 2
    return [*ordered[:first], *ordered[first :: -(-(len(ordered) - first) // (count - first))]]


def _better(cost_s: float, gain: int, than_s: float, than_gain: int) -> bool:
    """Say whether a repair is better than another: it costs less by what it gains, or gains more for about the same."""
    rate, than = cost_s / gain, than_s / than_gain
    return rate < than / ABOUT or (rate < than * ABOUT and gain > than_gain)


def _most_promising(
    found: Mapping[tuple[int, tuple[int, ...]], tuple[float, int]],
) -> list[tuple[int, tuple[int, ...]]]:
    """Return repairs, those first that cost little by what they gain; of about the same those that gain most."""
    rate = {key: cost_s / gain for key, (cost_s, gain) in found.items()}
    order = sorted(found, key=lambda key: (rate[key], key))
    taken: list[tuple[int, tuple[int, ...]]] = []
    begin = 0
    while begin < len(order):
        end = begin + 1
        while end < len(order) and rate[order[end]] <= ABOUT * rate[order[begin]]:
            end += 1
        taken += sorted(order[begin:end], key=lambda key: (-found[key][1], key))
        begin = end
    return taken


def _above(levels: Sequence[int], budget_bytes: int) -> int:
    return sum(level - budget_bytes for level in levels if level > budget_bytes)
