"""Orders the runs that the cut formulation found: in each interval as late as what needs them allows."""

from __future__ import annotations

from collections.abc import Sequence

from stowage.stages.formulations.cuts.solve import CutAnswer
from stowage.stages.formulations.cuts.step_graph import StepGraph


def order_of(step: StepGraph, answer: CutAnswer) -> list[tuple[int, int]]:
    """Return (node, interval) in the order in which they run.

    First runs follow the order of the nodes' numbers, which is a legal one. What runs again does so right before
    something that reads it, or before the cut at which it is kept. What changes a weight waits for all that still reads
    it as it was. Memory between the cuts is for the referee to judge.
    """
    return _changes_last(step, _Order(step, answer).runs)


def _changes_last(step: StepGraph, runs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return an order in which what changes a weight comes behind all that uses it as it was, what runs again too.

    It stays where it is if what it makes, or the change, is used before that.
    """
    last: dict[int, int] = {}
    first: dict[int, int] = {}
    for position, (node, _) in enumerate(runs):
        first.setdefault(node, position)
        last[node] = position
    place = {position: (position, 0) for position in range(len(runs))}
    for node in sorted(step.after, key=lambda n: first.get(n, -1)):
        until = max((last.get(earlier, -1) for earlier in step.after[node]), default=-1)
        if node in first and until > first[node] and not _is_used(step, node, runs[first[node] : until + 1]):
            place[first[node]] = until, first[node] + 1
    return [runs[position] for position in sorted(place, key=lambda position: place[position])]


def _is_used(step: StepGraph, node: int, runs: Sequence[tuple[int, int]]) -> bool:
    """Say whether any of some runs reads what a node makes, or comes after what it changes."""
    made = set(step.nodes[node].creates)
    return any(node in step.after.get(other, ()) or not made.isdisjoint(step.reads[other]) for other, _ in runs)


class _Order:
    def __init__(self, step: StepGraph, answer: CutAnswer) -> None:
        self._step = step
        self._ran: set[int] = set()
        self._live: set[int] = set(step.waiting)
        self._interval = 0
        self.runs: list[tuple[int, int]] = []
        chosen: list[list[int]] = [[] for _ in range(len(answer.cuts) + 1)]
        for node, interval in sorted(answer.runs):
            chosen[interval].append(node)
        kept = [set[int]() for _ in chosen]
        for value, cut in answer.keeps:
            kept[cut].add(value)
        for interval, nodes in enumerate(chosen):
            self._interval = interval
            last = answer.cuts[interval] if interval < len(answer.cuts) else -1
            self._first_runs(nodes, last)
            wanted = kept[interval + 1] if interval + 1 < len(kept) else step.stays
            reads = step.reads[last] if last >= 0 else ()
            for value in sorted({*wanted, *reads}.difference(self._live, step.nodes[last].creates if reads else ())):
                self._need(value)
            if last >= 0:
                self._run(last)
                self._live &= kept[interval + 1]

    def _first_runs(self, nodes: Sequence[int], last: int) -> None:
        for node in nodes:
            if node not in self._ran and node != last:
                self._ready(node)
                if node not in self._ran:
                    self._run(node)

    def _ready(self, node: int) -> None:
        for value in self._step.reads[node]:
            if value not in self._live:
                self._need(value)

    def _need(self, value: int) -> None:
        """Run again what makes a value, and before that what makes what it reads."""
        stack = [self._step.maker[value]] if value in self._step.maker else []
        while stack:
            node = stack[-1]
            missing = [s for s in self._step.reads[node] if s not in self._live and s in self._step.maker]
            if missing:
                # What takes most to make comes first: of what it reads little is still there when the rest is made.
                makers = dict.fromkeys(self._step.maker[s] for s in missing)
                stack += sorted(makers, key=lambda n: self._step.ancestors[n].bit_count())
                continue
            stack.pop()
            if not self._live.issuperset(self._step.nodes[node].creates) or not self._step.nodes[node].creates:
                self._run(node)

    def _run(self, node: int) -> None:
        self._ran.add(node)
        self._live.update(self._step.nodes[node].creates)
        self.runs.append((node, self._interval))
