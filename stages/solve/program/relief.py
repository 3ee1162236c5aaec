"""Repairs an order that needs a little more than the budget: makes values again, or moves runs, where it is exceeded."""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from stowage.stages.solve.program.chain import Execution
from stowage.stages.solve.program.evicting import eviction_step
from stowage.stages.solve.program.program import StepProgram

TRIED = 12
"""Repairs of one place that are tried: those that promise most memory for their time."""

LONGEST_CHAIN = 24
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

        Where the order needs most, what is in memory there and read only later is dropped and made again right before it
        is read, or the run moves to where there is more room. Of all repairs the one is taken that lowers what is above
        the budget, summed over the runs, most for its time, until nothing is above it.

        Args:
            executions: a legal order.
            budget_bytes: of the device.
            most_s: seconds that it may take longer.
            until_s: on the clock of `time.monotonic`, when to give up.
        """
        order, spent_s = list(executions), 0.0
        levels = self.program.levels(order)
        above = _above(levels, budget_bytes)
        for _ in range(ROUNDS):
            if not above:
                return order
            best: tuple[float, _Repair, list[int], int] | None = None
            place = max(range(len(order)), key=lambda p: levels[p])
            for repair in self._repairs(order, place, levels[place] - budget_bytes):
                if time.monotonic() > until_s:
                    return None
                if spent_s + repair.time_s > most_s:
                    continue
                found = self.program.levels(repair.order)
                left = _above(found, budget_bytes)
                if left >= above:
                    continue
                cost = repair.time_s / (above - left)
                if best is None or cost < best[0]:
                    best = cost, repair, found, left
                    if not cost:
                        break
            if best is None:
                return None
            _, repair, levels, above = best
            order, spent_s = repair.order, spent_s + repair.time_s
        return None

    def _repairs(self, order: list[Execution], place: int, needed_bytes: int) -> Iterator[_Repair]:
        """Yield repairs of a place, those that cost nothing first."""
        uses = _Uses(self.program, order)
        yield from self._moved(order, uses, place)
        found: list[tuple[float, int, tuple[int, ...]]] = []
        for (storage, made), reads in uses.of.items():
            at = bisect_right(reads, place - 1)
            if not made < place or at == len(reads) or reads[at] in (place, len(order)):
                continue
            for keeps in (False, True):
                chain = self._chain(order, uses, storage, place, reads[at], keeps)
                if chain is not None:
                    nbytes = min(self.program.nbytes[storage], needed_bytes)
                    cost_s = sum(self._time_s[n] for n in chain)
                    found.append((cost_s / max(nbytes, 1), reads[at], chain))
        for _, before, chain in sorted(set(found))[:TRIED]:
            label = order[before].label
            again = [Execution(n, label) for n in chain]
            repaired = self.program.without_dead([*order[:before], *again, *order[before:]])
            yield _Repair(repaired, self._seconds(repaired) - self._seconds(order))

    def _seconds(self, order: Sequence[Execution]) -> float:
        return sum(self._time_s[e.node] for e in order)

    def _chain(
        self, order: Sequence[Execution], uses: _Uses, storage: int, place: int, before: int, keeps: bool
    ) -> tuple[int, ...] | None:
        """Return the nodes that make a value again right before a run, or None where that cannot be.

        Args:
            order: the executions.
            uses: who reads what in it.
            storage: the value, dropped while the run at `place` is under way.
            place: where room is missing.
            before: the run before which it is made again.
            keeps: keep for it what was read for the last time before, instead of making that again too.
        """
        chain: list[int] = []
        done: set[int] = set()
        stack = [(storage, False)]
        while stack:
            value, ready = stack.pop()
            node = self._maker.get(value, -1)
            if ready:
                if node not in done:
                    done.add(node)
                    chain.append(node)
                continue
            if node in done:
                continue
            if node < 0 or not self._may_run(uses, node, before) or len(done) + len(stack) > LONGEST_CHAIN:
                return None
            stack.append((value, True))
            for read in self.program.reads[node]:
                if read in self.program.nodes[node].creates or uses.live(read, before) and read != storage:
                    continue
                if keeps and uses.dies_after(read, place):
                    continue
                stack.append((read, False))
        return tuple(chain)

    def _may_run(self, uses: _Uses, node: int, before: int) -> bool:
        """Say whether a node may run again right before a position."""
        last = self._last_again[node]
        return not self.program.nodes[node].once and uses.first.get(last, len(uses.order)) >= before

    def _moved(self, order: list[Execution], uses: _Uses, place: int) -> Iterator[_Repair]:
        """Yield orders in which the run at a place comes right before what reads its results, or after what it reads."""
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


def _above(levels: Sequence[int], budget_bytes: int) -> int:
    return sum(level - budget_bytes for level in levels if level > budget_bytes)
