"""A weight is updated only after all that uses it as it was, also where an earlier update would save memory."""

from __future__ import annotations

from dataclasses import replace

from stowage.stages.formulations.cuts.schedule import order_of
from stowage.stages.formulations.cuts.solve import solve_cuts
from stowage.stages.formulations.cuts.step_graph import StepGraph, after_changes
from stowage.stages.solver.outcome import SolverSettings
from tests.formulations.cuts.by_hand import node, step

CUT, USES, UPDATES = 4, 2, 3


def backward(*, ordered: bool) -> StepGraph:
    """While node 4 runs the gradient is there, or what node 2 makes with the weight that the gradient updates."""
    gradient, x, y, z, loss, weight = range(6)
    nodes = [
        node(0, [], [gradient]),
        node(1, [], [x]),
        node(USES, [x, weight], [y]),
        replace(node(UPDATES, [gradient, weight], []), mutates=(weight,)),
        node(CUT, [x], [z]),
        node(5, [y, z], [loss]),
    ]
    found = step([*nodes], [8, 1, 8, 1, 1, 0], stays=[loss])
    assert after_changes(nodes, {weight}) == {UPDATES: (USES,)}
    once = frozenset(range(6))
    return replace(found, once=once, after=after_changes(nodes, {weight}) if ordered else {})


def order(graph: StepGraph) -> list[int]:
    return [n for n, _ in order_of(graph, solve_cuts(graph, (CUT,), 10, SolverSettings(20.0)))]


def test_the_order_is_kept() -> None:
    runs = order(backward(ordered=True))
    assert runs.index(USES) < runs.index(UPDATES)
    runs = order(backward(ordered=False))
    assert runs.index(UPDATES) < runs.index(USES), "or else this test shows nothing"
