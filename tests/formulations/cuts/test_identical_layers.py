"""Why identical layers do not share variables: the best plan of three of them treats one differently."""

from __future__ import annotations

import pytest

from stowage.stages.formulations.cuts.model import build
from stowage.stages.formulations.cuts.solve import solve_cuts
from stowage.stages.formulations.cuts.step_graph import StepGraph
from stowage.stages.solver.milp import solve_milp
from stowage.stages.solver.outcome import SolverSettings
from tests.formulations.cuts.by_hand import node, step
from tests.formulations.cuts.every_schedule import fastest

LAYERS = 3
INPUTS = tuple(range(LAYERS + 1))
LARGE = tuple(range(LAYERS + 1, 2 * LAYERS + 1))
TURN = 2 * LAYERS + 1


def three_layers() -> StepGraph:
    """Each makes something large of its input, of which it makes the next input; backward reads what is large."""
    nodes = [node(0, [], [INPUTS[0]])]
    for k in range(LAYERS):
        nodes.append(node(len(nodes), [INPUTS[k]], [LARGE[k]]))
        nodes.append(node(len(nodes), [LARGE[k]], [INPUTS[k + 1]]))
    gradient = len(INPUTS) + len(LARGE)
    nodes.append(node(TURN, [INPUTS[-1]], [gradient]))
    for k in reversed(range(LAYERS)):
        nodes.append(node(len(nodes), [gradient, LARGE[k]], [gradient + 1]))
        gradient += 1
    return step(nodes, [1] * len(INPUTS) + [4] * len(LARGE) + [1] * (LAYERS + 1), stays=[gradient])


def test_tied_variables_exceed_the_optimum_of_three_identical_layers() -> None:
    """There is room for two of three large values at the turn: to keep all or none costs three runs, not one."""
    graph, budget, limits = three_layers(), 11, SolverSettings(20.0)
    once_s = sum(n.time_s for n in graph.nodes)
    optimum = fastest(graph, budget)
    assert optimum == once_s + 1
    assert solve_cuts(graph, [TURN], budget, limits).bound_s == pytest.approx(optimum, rel=1e-3)
    tied = build(graph, [TURN], budget)
    for k in range(1, LAYERS):
        tied.problem += tied.keeps(LARGE[k], 1) == tied.keeps(LARGE[0], 1)
    outcome = solve_milp(tied.problem, limits)
    assert outcome.status == "optimal"
    assert outcome.objective * tied.time_unit_s == pytest.approx(once_s + LAYERS)
    assert outcome.bound * tied.time_unit_s > optimum * 1.1
