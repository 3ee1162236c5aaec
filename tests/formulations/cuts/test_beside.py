"""What must be in memory beside a node: nothing that may be made after it, also of what runs only once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stowage.stages.formulations.cuts.solve import solve_cuts
from stowage.stages.solver.outcome import SolverSettings
from tests.formulations.cuts.by_hand import node, step
from tests.formulations.cuts.every_schedule import fastest

HEAVY = 1


def test_what_runs_once_may_do_so_after_the_heavy_node() -> None:
    """There is no room for what node 2 makes beside node 1, whose input is freed before node 2 runs."""
    a, b, c, d = range(4)
    nodes = [node(0, [], [a]), node(HEAVY, [a], [b]), node(2, [], [c]), node(3, [b, c], [d])]
    graph = replace(step(nodes, [5, 2, 5, 1], stays=[d]), once=frozenset((2,)))
    assert fastest(graph, 8) == graph.once_s
    for integral in (True, False):
        found = solve_cuts(graph, (0,), 8, SolverSettings(20.0), heavy=(HEAVY,), integral=integral)
        assert found.bound_s == pytest.approx(graph.once_s, rel=1e-5)
