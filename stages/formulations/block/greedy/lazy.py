"""Makes a schedule from a choice of what is not kept, in time linear in the graph.

A choice is a set of *cuts*: cut (k, t) says that the outputs of forward node k are not kept across the end of stage t.
Everything follows from it, latest consumers first: where a cut falls between two uses of k's outputs, k runs again at
the later one, lazily; that is one more use of its own inputs, which are kept, or made again, by the same rule. Without
cuts the result is plain PyTorch; a cut at the loss means "drop after forward".
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from stowage.stages.formulations.block.staged_order import (
    Executions,
    StagedCost,
    StagedGraph,
    Timeline,
    cost_of,
    timeline,
)

Choice = Mapping[int, Sequence[int]]
"""Stages whose end the outputs of each forward node (staged number) do not cross, ascending."""

# Cuts of cuts could multiply: from this many copies on, the last one is kept.
_MOST_COPIES = 8


@dataclass(frozen=True)
class Candidate:
    """A choice, the executions that follow from it, and what they cost."""

    choice: Choice
    executions: Executions
    line: Timeline
    cost: StagedCost


def drop_after_forward(graph: StagedGraph, nodes: Iterable[int]) -> dict[int, tuple[int, ...]]:
    """Return the choice that drops these nodes' outputs between forward and backward."""
    return dict.fromkeys(sorted(nodes), (graph.loss,))


def with_cuts(choice: Choice, cuts: Iterable[tuple[int, int]]) -> dict[int, tuple[int, ...]]:
    """Add cuts to a choice."""
    merged = {k: set(stages) for k, stages in choice.items()}
    for k, stage in cuts:
        merged.setdefault(k, set()).add(stage)
    return {k: tuple(sorted(stages)) for k, stages in merged.items()}


def candidate_of(graph: StagedGraph, choice: Choice) -> Candidate:
    """Make the schedule that follows from a choice, and its cost."""
    executions = executions_of(graph, choice)
    line = timeline(graph, executions)
    return Candidate(choice, executions, line, cost_of(graph, line))


def executions_of(graph: StagedGraph, choice: Choice) -> Executions:
    """Return the stages in which every node runs."""
    executions: dict[int, list[int]] = {k: [k] for k in range(len(graph.nodes))}
    end, outgoing = len(graph.nodes) - 1, set(graph.block.outgoing)
    for k in range(graph.loss - 1, -1, -1):
        cuts = choice.get(k)
        if not cuts or graph.nodes[k].once:
            continue
        needs = {t for a in graph.nodes[k].creates for r in graph.readers[a] for t in executions[r]}
        if any(a in outgoing for a in graph.nodes[k].creates):
            needs.add(end)
        last, stages = k, executions[k]
        for t in sorted(needs):
            first = bisect_left(cuts, last)
            if first < len(cuts) and cuts[first] < t and len(stages) < _MOST_COPIES:
                stages.append(t)
            last = t
    return executions
