"""Says which variables of the cut formulation follow from the graph, and which the solver has to find."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from stowage.stages.formulations.cuts.step_graph import StepGraph

Keys = set[tuple[int, int]]


@dataclass
class Domain:
    """Sorts run[n, i] and kept[s, j] into those that are 1, those that are 0, and those that are free.

    Attributes:
        first: for each node the first and the last interval in which its first run may be; for an optional one the last
            in which a family may need it, or −1.
        families: for each family likewise.
        optional: nodes that need not run.
        leaves: whether what nobody can make again may leave memory all the same, and come back.
        sure_runs, free_runs: (node, interval) that are 1, and that are free; all others are 0.
        sure_keeps, free_keeps: (value, cut), likewise.
    """

    first: list[tuple[int, int]]
    families: list[tuple[int, int]]
    optional: frozenset[int] = frozenset()
    leaves: bool = False
    sure_runs: Keys = field(default_factory=set)
    free_runs: Keys = field(default_factory=set)
    sure_keeps: Keys = field(default_factory=set)
    free_keeps: Keys = field(default_factory=set)

    @staticmethod
    def of(
        step: StepGraph, cuts: Sequence[int], *, optional: frozenset[int] = frozenset(), leaves: bool = False
    ) -> Domain:
        """Sort the variables.

        Args:
            step: the graph of the step.
            cuts: g_1 to g_N.
            optional: nodes that need not run.
            leaves: whether values may leave memory, and come back.

        Raises:
            ValueError: a cut is not a strict descendant of the one before.
        """
        for earlier, later in pairwise(cuts):
            if not step.precedes(earlier, later):
                raise ValueError(f"cut {later} is no strict descendant of cut {earlier}")
        found = Domain(*_first_intervals(step, cuts), optional, leaves)
        touched = {(s, j) for j, g in enumerate(cuts, start=1) for s in _touched(step, g)}
        count = len(cuts)
        wanted = set(step.stays)  # read after what was looked at so far, or left behind
        for interval in range(count, -1, -1):
            for node in range(len(step.nodes) - 1, -1, -1):
                found._sort_run(step, node, interval, wanted)
            if not interval:
                break
            cut = cuts[interval - 1]
            wanted.update(step.nodes[cut].creates, *(step.serving(cut, s) for s in step.reads[cut]))
            for value in wanted:
                found._sort_kept(step, value, interval, touched)
        return found

    def _sort_run(self, step: StepGraph, node: int, interval: int, wanted: set[int]) -> None:
        earliest, latest = self.first[node]
        if interval < earliest:
            return
        if interval > latest and (node in step.once or wanted.isdisjoint(step.nodes[node].creates)):
            return
        sure = interval == earliest == latest and node not in step.optional and node not in self.optional
        (self.sure_runs if sure else self.free_runs).add((node, interval))
        for value in step.reads[node]:
            wanted.update(step.serving(node, value))

    def _sort_kept(self, step: StepGraph, value: int, cut: int, touched: Keys) -> None:
        makers = step.makers.get(value, ())
        if makers and all(self.first[m][0] >= cut for m in makers):
            return  # not made yet
        sure = (value, cut) in touched
        if not self.leaves and not sure and all(m in step.once and self.first[m][1] < cut for m in makers):
            # Nobody can make it again, and something needs it for certain.
            readers = [n for n in step.readers[value] if n not in step.optional and step.serving(n, value) == (value,)]
            sure = value in step.stays or any(self.first[n][0] >= cut for n in readers)
        (self.sure_keeps if sure else self.free_keeps).add((value, cut))


def _touched(step: StepGraph, node: int) -> list[int]:
    """Return what is in memory for certain while a node runs."""
    return [*(s for s in step.reads[node] if step.serving(node, s) == (s,)), *step.nodes[node].creates]


def _first_intervals(step: StepGraph, cuts: Sequence[int]) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return for each node, and for each family, the first and the last interval in which its first run may be."""
    count = len(step.nodes)
    earliest = [0] * count
    latest = [len(cuts)] * (count + len(step.families))
    for j, cut in reversed(list(enumerate(cuts))):
        latest[cut] = j
        for n in (*range(cut), *range(count, len(latest))):
            if step.precedes(n, cut):
                latest[n] = j
    for j, cut in enumerate(cuts, start=1):
        for node in range(cut + 1, count):
            if step.precedes(cut, node):
                earliest[node] = j
    for j, cut in enumerate(cuts):
        earliest[cut] = j
    families = [(min(earliest[n] for n in f), latest[count + k]) for k, f in enumerate(step.families)]
    needed = {n: -1 if n not in step.once else len(cuts) for n in step.optional}
    for family, (_, last) in zip(step.families, families, strict=True):
        for node in family:
            needed[node] = max(last, needed[node] if node not in step.once else -1)
    return [(earliest[n], needed.get(n, latest[n])) for n in range(count)], families
