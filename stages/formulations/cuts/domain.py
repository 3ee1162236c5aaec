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
        first: for each node the first and the last interval in which its first run may be.
        sure_runs, free_runs: (node, interval) that are 1, and that are free; all others are 0.
        sure_keeps, free_keeps: (value, cut), likewise.
    """

    first: list[tuple[int, int]]
    sure_runs: Keys = field(default_factory=set)
    free_runs: Keys = field(default_factory=set)
    sure_keeps: Keys = field(default_factory=set)
    free_keeps: Keys = field(default_factory=set)

    @staticmethod
    def of(step: StepGraph, cuts: Sequence[int]) -> Domain:
        """Sort the variables.

        Raises:
            ValueError: a cut is not a strict descendant of the one before.
        """
        for earlier, later in pairwise(cuts):
            if not step.precedes(earlier, later):
                raise ValueError(f"cut {later} is no strict descendant of cut {earlier}")
        found = Domain(_first_intervals(step, cuts))
        touched = {(s, j) for j, g in enumerate(cuts, start=1) for s in (*step.reads[g], *step.nodes[g].creates)}
        count = len(cuts)
        wanted = set(step.stays)  # read after what was looked at so far, or left behind
        for interval in range(count, -1, -1):
            for node in range(len(step.nodes) - 1, -1, -1):
                found._sort_run(step, node, interval, wanted)
            if not interval:
                break
            wanted |= {s for s, j in touched if j == interval}
            for value in wanted:
                found._sort_kept(step, value, interval, touched)
        return found

    def _sort_run(self, step: StepGraph, node: int, interval: int, wanted: set[int]) -> None:
        earliest, latest = self.first[node]
        if interval < earliest:
            return
        if interval > latest and (node in step.once or wanted.isdisjoint(step.nodes[node].creates)):
            return
        (self.sure_runs if interval == earliest == latest else self.free_runs).add((node, interval))
        wanted.update(step.reads[node])

    def _sort_kept(self, step: StepGraph, value: int, cut: int, touched: Keys) -> None:
        maker = step.maker.get(value)
        if maker is not None and self.first[maker][0] >= cut:
            return  # not made yet
        sure = (value, cut) in touched
        if not sure and (maker is None or (maker in step.once and self.first[maker][1] < cut)):
            # Nobody can make it again, and something needs it for certain.
            sure = value in step.stays or any(self.first[n][0] >= cut for n in step.readers[value])
        (self.sure_keeps if sure else self.free_keeps).add((value, cut))


def _first_intervals(step: StepGraph, cuts: Sequence[int]) -> list[tuple[int, int]]:
    """Return for each node the first and the last interval in which its first run may be."""
    earliest = [0] * len(step.nodes)
    latest = [len(cuts)] * len(step.nodes)
    for j, cut in reversed(list(enumerate(cuts))):
        latest[cut] = j
        for node in range(cut):
            if step.precedes(node, cut):
                latest[node] = j
    for j, cut in enumerate(cuts, start=1):
        for node in range(cut + 1, len(step.nodes)):
            if step.precedes(cut, node):
                earliest[node] = j
    for j, cut in enumerate(cuts):
        earliest[cut] = j
    return list(zip(earliest, latest))
