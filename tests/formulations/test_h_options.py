"""Which options are offered, and which budgets are solved for."""

from __future__ import annotations

import random

from stowage.stages.formulations.h_budgets import explore, refine
from stowage.stages.formulations.h_options import costs_of, select_options, share_counts, undominated
from stowage.stages.formulations.h_policies import keep_all
from stowage.stages.formulations.h_problem import HProblem
from stowage.stages.formulations.h_retention import HRetention, smallest_peak
from stowage.stages.ir.h_graph import HOption, HRun, HStep
from stowage.stages.solver.outcome import SolverSettings
from tests.formulations.h_graphs import layered

LIMITS = SolverSettings(time_limit_s=5.0, gap=0.01)


def option(time_s: float, phantom: int, inside: int = 10, reads: tuple[int, ...] = ()) -> HOption:
    """An option with these costs."""
    return HOption("o", phantom, HRun(time_s / 2, (HStep(inside),)), HRun(time_s / 2, (HStep(inside),), reads))


def test_what_another_option_is_no_worse_than_is_never_offered() -> None:
    good, same, worse = option(1.0, 10), option(1.0, 10), option(2.0, 10)
    reading, smaller = option(2.0, 5, reads=(3,)), option(2.0, 5)
    assert undominated([worse, good, same]) == [good]
    assert undominated([reading, good, smaller]) == [good, smaller]
    assert undominated([option(1.0, 5, reads=(3,)), smaller]) == [option(1.0, 5, reads=(3,)), smaller]


def test_few_options_stand_for_many() -> None:
    # 50 nearly equal ones and a spread-out rest: taken evenly, most would be among the 50.
    crowd = [option(1.0 + i / 1000, 1000 - i) for i in range(50)]
    front = [*crowd, option(1.5, 500), option(2.0, 250), option(4.0, 100)]
    chosen = select_options(front, 4)
    assert [costs_of(o)[1] for o in chosen] == [1000, 500, 250, 100]
    assert select_options(front, 1) == (front[0],)
    assert len(select_options(front, 1000)) == len(front)
    assert len(set(select_options(front * 2, 1000))) == len(front)


def test_more_options_never_leave_more_regret() -> None:
    rng = random.Random(1)
    options = [option(rng.uniform(1, 3), rng.randint(1, 100), rng.randint(1, 100)) for _ in range(40)]

    def regret(count: int) -> float:
        taken = [costs_of(o) for o in select_options(options, count)]
        slower = []
        for c in map(costs_of, undominated(options)):
            fits = [t[0] - c[0] for t in taken if all(a <= b for a, b in zip(t[1:], c[1:], strict=True))]
            slower.append(min(fits, default=100.0))
        return max(slower)

    regrets = [regret(count) for count in range(1, len(undominated(options)) + 1)]
    assert regrets[-1] == 0.0
    assert regrets[-1] < regrets[len(regrets) // 2] <= regrets[0]
    assert select_options(options, 5) == select_options(options, 5)


def test_every_cluster_offers_one_option_at_least() -> None:
    assert share_counts([3, 4], 100) == [3, 4]
    assert share_counts([1, 1, 1, 97], 10) == [1, 1, 1, 9] or sum(share_counts([1, 1, 1, 97], 10)) <= 12
    counts = share_counts([10, 20, 30], 12)
    assert counts == [2, 4, 6]
    assert share_counts([10, 10, 10], 10) == [4, 3, 3]


def test_budgets_go_where_answers_differ() -> None:
    calls: list[int] = []

    def solve(budget: int) -> tuple[int, float, int] | None:
        """A steep end below 200, a flat one above; nothing below 100."""
        calls.append(budget)
        if budget < 100:
            return None
        used = min(budget, 800)
        return used, 10.0 * 100 / used if used < 200 else 5.0 - (used - 200) / 1000, used

    answers = refine(solve, 100, 1000, 10)
    assert len(calls) == len(set(calls)) <= 10
    assert answers == sorted(answers, reverse=True)
    assert answers[0] == 800
    assert answers[-1] == 100
    evenly = sum(100 + 90 * i < 200 for i in range(10))
    assert sum(budget < 200 for budget in calls) > evenly
    # What is known to be flat is not asked about.
    assert not [budget for budget in calls if 800 < budget < 1000]
    calls.clear()
    assert refine(solve, 10, 1000, 12)[-1] < 150
    assert None not in refine(solve, 10, 1000, 12)


def test_refining_ends_where_nothing_is_open() -> None:
    assert refine(lambda budget: (budget, 1.0, 7), 5, 100, 50) == [100, 5]
    assert refine(lambda budget: None, 5, 100, 50) == []


def test_exploring_gives_a_front_without_repetitions() -> None:
    graph = layered(5, 3)
    data = HProblem(graph)
    solver = HRetention(graph, LIMITS)
    least = smallest_peak(data, LIMITS)[1]
    answers = explore(data, solver.solve, least, peaks=4, saves=3)
    runs = [answer.schedule for answer in answers]
    assert len(runs) == len(set(runs)) <= 12
    assert all(runs)
    times = [answer.report.objective_s for answer in answers if answer.report]
    assert min(times) == times[0] == keep_all(data).cost.time_s
    assert len({answer.budgets[0] for answer in answers}) > 2
    assert any(answer.budgets[1] < answer.budgets[0] for answer in answers)
