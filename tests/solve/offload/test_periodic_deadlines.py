"""One worker, updates that come again every period, and their deadlines."""

from __future__ import annotations

from itertools import permutations

from hypothesis import given
from hypothesis import strategies as st

from stowage.stages.solve.offload.hiding.deadlines import UpdateTask, earliest_deadline_first

WHOLE = st.integers(0, 20).map(float)


def task(row: int, release_s: float, deadline_s: float, time_s: float) -> UpdateTask:
    return UpdateTask(row, (), row, release_s, deadline_s, time_s)


def latest(order: list[UpdateTask]) -> float:
    """How late the latest task of an order ends."""
    now, worst = 0.0, float("-inf")
    for t in order:
        now = max(now, t.release_s) + t.time_s
        worst = max(worst, now - t.deadline_s)
    return worst


@given(st.lists(st.tuples(WHOLE, WHOLE), max_size=5))
def test_no_order_is_better_where_all_are_released(found: list[tuple[float, float]]) -> None:
    tasks = [task(i, 0.0, deadline, time) for i, (deadline, time) in enumerate(found)]
    order = earliest_deadline_first(tasks, period_s=1e6)
    assert sorted(t.row for t in order) == list(range(len(tasks)))
    assert latest(order) == min(latest(list(p)) for p in permutations(tasks))


@given(st.lists(st.tuples(WHOLE, WHOLE, WHOLE), min_size=1, max_size=8))
def test_nothing_urgent_that_is_released_waits(found: list[tuple[float, float, float]]) -> None:
    tasks = [task(i, *numbers) for i, numbers in enumerate(found)]
    order = earliest_deadline_first(tasks, period_s=1e6)
    now = 0.0
    for number, t in enumerate(order):
        now = max(now, t.release_s)
        released = [other for other in order[number:] if other.release_s <= now]
        assert t.deadline_s == min(other.deadline_s for other in released)
        now += t.time_s


def test_what_an_iteration_leaves_is_done_first_in_the_next() -> None:
    """The worker is busy until 6 of each period of 10, so a task released at 1 has company at 6."""
    long, early, urgent = task(0, 8.0, 99.0, 8.0), task(1, 1.0, 50.0, 1.0), task(2, 5.0, 7.0, 1.0)
    assert [t.row for t in earliest_deadline_first([long, early, urgent], period_s=10.0)] == [2, 1, 0]
    assert [t.row for t in earliest_deadline_first([long, early, urgent], period_s=1e6)] == [1, 2, 0]
