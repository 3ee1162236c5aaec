"""A weight is updated only after all that uses it as it was, also where an earlier update would save memory."""

from __future__ import annotations

import math
from dataclasses import replace

from stowage.stages.formulations.cuts.schedule import order_of
from stowage.stages.formulations.cuts.solve import solve_cuts
from stowage.stages.formulations.cuts.step_graph import StepGraph, after_changes
from stowage.stages.solver.outcome import SolverSettings
from tests.formulations.cuts.by_hand import node, step
from tests.formulations.cuts.every_schedule import fastest

CUT, USES, UPDATES = 4, 2, 3


def backward(*, ordered: bool) -> StepGraph:
    """At node 4 the gradient is in memory, or what node 2 makes with the weight that the gradient updates."""
    gradient, x, y, z, loss, weight = range(6)
    nodes = [
        node(0, [], [gradient]),
        node(1, [gradient], [x]),
        node(USES, [x, weight], [y]),
        replace(node(UPDATES, [gradient, weight], []), mutates=(weight,)),
        node(CUT, [x], [z]),
        node(5, [y, z], [loss]),
    ]
    found = step([*nodes], [8, 1, 8, 1, 1, 0], stays=[loss])
    assert after_changes(nodes, {weight}) == {UPDATES: (USES,)}
    once = frozenset(range(6))
    return replace(found, once=once, after=after_changes(nodes, {weight}) if ordered else {})


def test_no_early_update_saves_memory() -> None:
    """Without the order the only schedule with less than either is the wrong one."""
    assert solve_cuts(backward(ordered=True), (CUT,), 9, SolverSettings(20.0)).status == "infeasible"
    assert fastest(backward(ordered=True), 9) == math.inf
    runs = order(backward(ordered=False), 9)
    assert runs.index(UPDATES) < runs.index(CUT) < runs.index(USES)


def test_the_order_is_kept() -> None:
    runs = order(backward(ordered=True), 10)
    assert runs.index(USES) < runs.index(UPDATES)


def order(graph: StepGraph, budget: int) -> list[int]:
    return [n for n, _ in order_of(graph, solve_cuts(graph, (CUT,), budget, SolverSettings(20.0)))]


def made_again() -> StepGraph:
    """There is no room for what node 0 makes of the weight beside the gradient's maker: node 4 reads it made anew."""
    x, y, gradient, loss, weight = range(5)
    nodes = [
        node(0, [weight], [x]),
        node(1, [x], [y]),
        node(2, [y], [gradient]),
        replace(node(3, [gradient, weight], []), mutates=(weight,)),
        node(4, [x, gradient], [loss]),
    ]
    found = step([*nodes], [8, 2, 1, 1, 0], stays=[loss])
    return replace(found, once=frozenset((2, 3, 4)), after=after_changes(nodes, {weight}))


def test_an_update_waits_for_what_is_made_again_with_the_weight_as_it_was() -> None:
    graph = made_again()
    runs = [n for n, _ in order_of(graph, solve_cuts(graph, (2,), 10, SolverSettings(20.0)))]
    assert runs == [0, 1, 2, 0, 3, 4]


def test_an_update_whose_result_is_used_stays_where_it_is() -> None:
    """The referee refuses such an order; another cut tells the program more."""
    graph = made_again()
    used = replace(graph, after={**graph.after, 4: (3,)})
    runs = [n for n, _ in order_of(used, solve_cuts(used, (2,), 10, SolverSettings(20.0)))]
    assert runs.index(3) < runs.index(4)
