"""Finds executions of an H-Graph from a choice of options and of what is not kept, in time linear in the graph.

As in `block/greedy/lazy.py`, a cut (k, t) says that what forward node k made is not kept across the end of stage t;
where a cut falls between two uses, k runs again at the later one, lazily. A dropped cluster does not keep its phantom
across the loss: its forward runs plainly first, and again, with the option, where its values are made again or else in
backward's stage.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass

from stowage.stages.formulations.cluster.problem import HProblem
from stowage.stages.formulations.cluster.staged_order import (
    ClusterExecution,
    Event,
    HRuns,
    HStagedCost,
    cost_of,
    timeline,
)

# Cuts of cuts could multiply: from this many runs on, the last copy is kept.
_MOST_RUNS = 8


@dataclass(frozen=True)
class HChoice:
    """A choice: the option of each cluster, clusters whose phantom is dropped at the loss, and cuts (node, stage)."""

    options: tuple[int, ...]
    dropped: frozenset[int] = frozenset()
    cuts: frozenset[tuple[int, int]] = frozenset()


@dataclass(frozen=True)
class HCandidate:
    """A choice with the executions that follow from it, and their cost."""

    choice: HChoice
    runs: HRuns
    events: tuple[Event, ...]
    cost: HStagedCost


def candidate_of(data: HProblem, choice: HChoice) -> HCandidate:
    """Make the schedule that follows from a choice, and its cost."""
    runs = runs_of(data, choice)
    events = timeline(data, runs)
    return HCandidate(choice, runs, events, cost_of(data, events))


def repeatable(data: HProblem, k: int) -> bool:
    """Say whether a forward node may run more than once."""
    return k < data.graph.loss and not data.once(k) and data.graph.nodes[k].plain is not None


def runs_of(data: HProblem, choice: HChoice) -> HRuns:
    """Return the executions of every node."""
    stages: dict[int, list[int]] = {}
    cuts: dict[int, list[int]] = {}
    for k, stage in sorted(choice.cuts):
        cuts.setdefault(k, []).append(stage)
    runs: dict[int, list[ClusterExecution]] = {}
    for k in range(data.size - 1, -1, -1):
        stages[k] = _stages(data, choice, k, stages, cuts.get(k, [])) if repeatable(data, k) else [k]
        runs[k] = _with_options(data, choice, k, stages[k])
    return dict(sorted(runs.items()))


def _stages(data: HProblem, choice: HChoice, k: int, stages: dict[int, list[int]], cuts: list[int]) -> list[int]:
    needs: set[int] = set()
    for d in data.graph.nodes[k].makes:
        for r in data.readers[d]:
            if _reads(data, choice, r, d):
                needs.update(stages[r])
        if d in data.graph.final:
            needs.add(data.size - 1)
    found, last = [k], k
    for t in sorted(needs) if cuts else ():
        first = bisect_left(cuts, last)
        if first < len(cuts) and cuts[first] < t and len(found) < _MOST_RUNS:
            found.append(t)
        last = t
    j = data.forward_of.get(k)
    if j is not None and j in choice.dropped:
        backward = data.graph.clusters[j].backward
        if not any(data.graph.loss < t <= backward for t in found):
            found = sorted({*found, backward})
    return found


def _reads(data: HProblem, choice: HChoice, r: int, d: int) -> bool:
    """Say whether node r reads value d under this choice."""
    j = data.backward_of.get(r)
    if j is None:
        return True
    return any(d in way.reads for way in data.ways[r] if way.option == choice.options[j])


def _with_options(data: HProblem, choice: HChoice, k: int, stages: list[int]) -> list[ClusterExecution]:
    """Give the option to the last run that can serve backward; a kept phantom is in memory at the loss."""
    j = data.cluster_of.get(k)
    if j is None:
        return [ClusterExecution(t) for t in stages]
    cluster, option = data.graph.clusters[j], choice.options[j]
    if k == cluster.backward:
        return [ClusterExecution(t, option) for t in stages]
    limit = cluster.backward if j in choice.dropped else data.graph.loss
    serving = bisect_right(stages, limit) - 1
    return [ClusterExecution(t, option if i == serving else None) for i, t in enumerate(stages)]
