"""A lossy plan is taken only where it is faster than exact ones by more than measured times vary."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stowage.flows.planning.by_rules import blank_summary
from stowage.stages.solve.summary import Solved
from stowage.stages.solve.variants import NOISE, preferred


def plan(time_s: float, *, exact: bool) -> Solved:
    return Solved([], replace(blank_summary(), step_time_s=time_s, exact=exact), [])


@pytest.mark.parametrize(("lossy_s", "taken"), [(1 - NOISE / 2, True), (1 - 2 * NOISE, False), (1.1, True)])
def test_a_lossy_plan_must_be_faster_than_noise(lossy_s: float, taken: bool) -> None:
    found = [plan(1.2, exact=True), plan(lossy_s, exact=False), plan(1.0, exact=True)]
    best = preferred(found)
    assert best.summary.exact == taken
    assert best.summary.step_time_s == (1.0 if taken else lossy_s)


def test_where_no_exact_plan_fits_a_lossy_one_is_taken() -> None:
    assert preferred([plan(2.0, exact=False), plan(1.0, exact=False)]).summary.step_time_s == 1.0
