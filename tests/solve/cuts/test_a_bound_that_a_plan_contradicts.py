"""A bound above the time of a plan is wrong: the plan is kept without it, and whoever tests or measures is told."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest

from stowage.stages.solve import Solved
from stowage.stages.solve.cuts.statement import (
    TOLERANCE,
    Bound,
    ContradictedBound,
    contradictions_are_errors,
    with_bound,
)
from tests.solve.prepared import prepared_zoo

PROVEN = 1e-3


def plan_and_bound(factor: float) -> tuple[Solved, Bound]:
    """A plan that is not optimal, and a bound of so many times its time."""
    plan = prepared_zoo("gpt2").smallest()
    plan = replace(plan, summary=replace(plan.summary, status="heuristic", gap=0.5))
    return plan, Bound(plan.summary.step_time_s * factor, "cuts", ("here",), "plain")


@pytest.mark.parametrize("factor", [1 + 2 * TOLERANCE, 1.5])
def test_the_plan_is_returned_as_it_was_with_a_warning(factor: float) -> None:
    plan, bound = plan_and_bound(factor)
    with pytest.warns(ContradictedBound, match="Internal error: .*cuts of plain at here"):
        assert with_bound(plan, bound, PROVEN) == plan
    assert plan.summary.bound_s == 0.0


def test_it_is_an_error_in_tests_and_where_bounds_are_measured() -> None:
    plan, bound = plan_and_bound(1.01)
    with pytest.raises(ContradictedBound):
        with_bound(plan, bound, PROVEN)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with contradictions_are_errors(), pytest.raises(ContradictedBound):
            with_bound(plan, bound, PROVEN)


def test_what_solvers_and_sums_leave_open_is_taken_off() -> None:
    plan, bound = plan_and_bound(1 + TOLERANCE / 2)
    summary = with_bound(plan, bound, PROVEN).summary
    assert (summary.bound_s, summary.gap, summary.status) == (summary.step_time_s, 0.0, "optimal")


@pytest.mark.parametrize(("factor", "status"), [(0.9995, "optimal"), (0.99, "heuristic")])
def test_a_bound_below_the_plan_is_stated(factor: float, status: str) -> None:
    plan, bound = plan_and_bound(factor)
    summary = with_bound(plan, bound, PROVEN).summary
    assert (summary.bound_s, summary.bound_kind, summary.bound_cuts) == (bound.seconds, "cuts", ("here",))
    assert summary.gap == pytest.approx(1 - factor)
    assert summary.status == status
