"""What is there throughout may serve in one way where another reads what is made: then nothing need be kept for it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stowage.stages.formulations.cuts.solve import solve_cuts
from stowage.stages.solver.outcome import SolverSettings
from tests.formulations.cuts.by_hand import node, step


def test_what_lasts_serves_in_the_place_of_what_is_made() -> None:
    """There is no room for the first result beside the third: it is made again, unless a weight does for its reader."""
    first, second, third, fourth, weight = range(5)
    made = step(
        [
            node(0, [], [first], time_s=2.0),
            node(1, [first], [second]),
            node(2, [second], [third]),
            node(3, [third, first], [fourth]),
        ],
        [4, 4, 4, 1, 4],
        stays=[fourth],
    )
    needed = solve_cuts(made, [2], 10, SolverSettings(20.0))
    assert needed.bound_s == pytest.approx(7.0, rel=1e-5)
    served = replace(made, instead={(3, first): (weight,)})
    assert served.readers[first] == [1]
    found = solve_cuts(served, [2], 10, SolverSettings(20.0))
    assert found.bound_s == pytest.approx(5.0, rel=1e-5)
