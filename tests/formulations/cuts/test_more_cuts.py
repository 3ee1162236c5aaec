"""More cuts never bound less than one of them, already as linear programs."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stowage.stages.formulations.cuts.solve import ROUNDING, solve_cuts
from stowage.stages.formulations.cuts.step_graph import StepGraph
from stowage.stages.solver.outcome import SolverSettings
from tests.formulations.cuts.by_hand import node, step
from tests.formulations.cuts.every_schedule import fastest
from tests.formulations.cuts.tiny_steps import chains_of_cuts, peak_bytes, tiny_steps
from tests.matrix import examples

SAME = 1 + 3 * ROUNDING


def relaxed(graph: StepGraph, cuts: tuple[int, ...], budget: int) -> float:
    return solve_cuts(graph, cuts, budget, SolverSettings(20.0), integral=False).bound_s


@settings(max_examples=examples(150), deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_of_tiny_steps(data: st.DataObject) -> None:
    graph = data.draw(tiny_steps())
    cuts = data.draw(chains_of_cuts(graph))
    budget = peak_bytes(graph) - data.draw(st.integers(1, 8))
    bound_s = relaxed(graph, cuts, budget)
    assert all(bound_s * SAME >= relaxed(graph, (cut,), budget) for cut in cuts)


def test_what_makes_what_remains_does_not_run_by_halves_after_a_cut() -> None:
    """Node 4 reads what 0 makes, may run at any time, and its value stays; while 2 runs half of one has room."""
    a, x, y, z, w = range(5)
    nodes = [node(0, [], [a], 4.0), node(1, [a], [x]), node(2, [x], [y], workspace_bytes=1), node(3, [y], [z])]
    graph = step([*nodes, node(4, [a], [w])], [2, 1, 6, 1, 2], stays=[w])
    once_s = sum(n.time_s for n in graph.nodes)
    assert fastest(graph, 9) == once_s + 4.0
    one_s = relaxed(graph, (2,), 9)
    assert one_s == pytest.approx(once_s + 2.0, rel=1e-5)
    assert relaxed(graph, (2, 3), 9) == pytest.approx(one_s, rel=1e-5)
