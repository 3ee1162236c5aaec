"""More memory never makes a curve slower, whatever order plans are found in, and each row says whose plan it has."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stowage.stages.ir.curve import CurvePoint
from stowage.stages.ir.errors import Infeasible
from stowage.stages.solve.curve import never_slower_with_more, point_of, spread_points
from stowage.stages.solve.goals import Kept, least, whole_budget

MIB = 1 << 20


def _point(budget: int, time_s: float | None) -> CurvePoint:
    if time_s is None:
        return CurvePoint(budget, False, smallest_feasible_bytes=budget + 1)
    return CurvePoint(budget, True, budget - 1, time_s, plan_hash=f"for {budget}", planned_within_bytes=budget)


TIMES = st.one_of(st.none(), st.floats(min_value=1.0, max_value=9.0))


@given(st.dictionaries(st.integers(min_value=2, max_value=99), TIMES, min_size=1))
def test_more_memory_is_never_slower(times: dict[int, float | None]) -> None:
    found = never_slower_with_more(_point(b, t) for b, t in times.items())
    assert [p.budget_bytes for p in found] == sorted(times, reverse=True)
    assert all(more.step_time_s <= less.step_time_s for more, less in pairwise(found) if less.feasible)
    assert all(more.feasible for more, less in pairwise(found) if less.feasible)
    for point in found:
        fitting = [t for b, t in times.items() if b <= point.budget_bytes and t is not None]
        assert point.feasible == bool(fitting)
        if point.feasible:
            assert point.step_time_s == min(fitting)
            assert times[point.planned_within_bytes] == point.step_time_s
            assert point.plan_hash == f"for {point.planned_within_bytes}"
            assert point.peak_bytes < point.planned_within_bytes <= point.budget_bytes
            assert point.borrowed == (point.planned_within_bytes < point.budget_bytes)


def _summary(budget: int, time_s: float, smallest: int) -> Any:
    summary = SimpleNamespace(
        device_peak_bytes=budget, step_time_s=time_s, recomputed_bytes=0, offload_bytes=0, reload_bytes=0,
        lower_tier_bytes=0, wait_s=0.0, smallest_feasible_bytes=smallest, method="sweep", variant="plain",
        plan_hash=f"for {budget}",
    )  # fmt: skip
    return SimpleNamespace(summary=summary)


def test_a_plan_for_more_memory_that_is_slower_gives_way() -> None:
    """Rules that work well at 600 and badly just above, as Belady's rule can."""

    def solve(budget: int) -> Any:
        if budget < 400:
            raise Infeasible(budget, 400, "a block, forward")
        return _summary(budget, 1.5 if 600 <= budget <= 640 else 3 - budget / 1000, 400)

    kept = Kept(1000, 1.0)
    budgets = [1000, 900, 800, 700, 620, 500, 400, 300]
    alone = [point_of(b, solve, kept) for b in budgets]
    assert alone[3].step_time_s > alone[4].step_time_s, "otherwise nothing is mended"
    found = never_slower_with_more(alone)
    assert [p.planned_within_bytes for p in found] == [620, 620, 620, 620, 620, 500, 400, 0]
    assert [p.borrowed for p in found] == [True, True, True, True, False, False, False, False]
    assert not found[-1].feasible
    spread = spread_points(9, 400, 1000, lambda b: point_of(b, solve, kept))
    assert [p.step_time_s for p in spread] == sorted(p.step_time_s for p in spread)


def test_budgets_of_a_point_all_count_the_reserve() -> None:
    """On a GPU the least budget of a row that has a plan is as large as that of an error, which counts the reserve."""

    def reserve(budget: int) -> int:
        return 32 * MIB + budget // 50

    point = point_of(100 * MIB, lambda budget: _summary(60 * MIB, 1.0, 50 * MIB), Kept(100 * MIB, 1.0), reserve)
    assert point.smallest_feasible_bytes == whole_budget(50 * MIB, reserve) > 82 * MIB


class _Counting:
    """A planner that has no plan with less than a limit, and counts what it is asked."""

    def __init__(self, limit: int) -> None:
        self.limit, self.asked = limit, 0

    def __call__(self, budget: int) -> Any:
        self.asked += 1
        if budget < self.limit:
            raise Infeasible(budget, self.limit, "a block, forward")
        return _summary(budget, 1.0, self.limit)


@pytest.mark.parametrize(("quick", "thorough", "asked"), [(400, 400, 1), (400, 390, 2), (400, 450, 2)])
def test_the_least_memory_is_searched_with_the_quick_planner(quick: int, thorough: int, asked: int) -> None:
    slow = _Counting(thorough)
    assert least(slow, _Counting(quick)) == thorough
    assert slow.asked == asked


@pytest.mark.parametrize("true", [1, 2, 700, 1499, 1500])
def test_there_is_no_plan_with_a_byte_less_where_rules_name_more_than_they_need(true: int) -> None:
    """Greedy eviction looks for the least memory coarsely, and finds plans for less when it is asked for them."""

    class Coarse(_Counting):
        def __call__(self, budget: int) -> Any:
            self.asked += 1
            if budget < true:
                raise Infeasible(budget, 1500, "a block, forward")
            return _summary(budget, 1.0, 1500)

    solve = Coarse(true)
    assert least(solve) == true
    assert solve.asked < 40
