"""Which options are offered, and which budgets are solved for."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

from stowage.stages.formulations.cluster.answer import Budgets
from stowage.stages.formulations.cluster.budgets import Met, explore, refine
from stowage.stages.formulations.cluster.offered_options import costs_of, select_options, share_counts, undominated
from stowage.stages.ir.h_graph import HOption, HRun, HStep

Asked, Answer = TypeVar("Asked"), TypeVar("Answer")


def answers_of(
    rounds: Generator[list[Asked], Sequence[Answer], None], solve: Callable[[Asked], Answer]
) -> dict[Asked, Answer]:
    """All answers, one after the other."""
    found: dict[Asked, Answer] = {}
    with contextlib.suppress(StopIteration):
        asked = next(rounds)
        while True:
            found.update({one: solve(one) for one in asked})
            asked = rounds.send([found[one] for one in asked])
    return found


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


def refined(solve: Callable[[int], tuple[float, int] | None], low: int, high: int, count: int) -> list[int]:
    """Budgets with an answer, largest first."""
    found = answers_of(refine(low, high, count), solve)
    return sorted((budget for budget, answer in found.items() if answer is not None), reverse=True)


def test_budgets_go_where_answers_differ() -> None:
    calls: list[int] = []

    def solve(budget: int) -> tuple[float, int] | None:
        """A steep end below 200, a flat one above; nothing below 100."""
        calls.append(budget)
        if budget < 100:
            return None
        used = min(budget, 800)
        return 10.0 * 100 / used if used < 200 else 5.0 - (used - 200) / 1000, used

    answers = refined(solve, 100, 1000, 10)
    assert len(calls) == len(set(calls)) <= 10
    assert answers[0] == 1000
    assert answers[-1] == 100
    evenly = sum(100 + 90 * i < 200 for i in range(10))
    assert sum(budget < 200 for budget in calls) > evenly
    # What is known to be flat is not asked about.
    assert not [budget for budget in calls if 800 < budget < 1000]
    calls.clear()
    assert refined(solve, 10, 1000, 12)[-1] < 150
    assert len(calls) <= 12


def test_refining_ends_where_nothing_is_open() -> None:
    assert refined(lambda budget: (1.0, 7), 5, 100, 50) == [100, 5]
    assert refined(lambda budget: None, 5, 100, 50) == []
    assert refined(lambda budget: (1.0, 7), 5, 5, 50) == [5]
    assert list(refine(5, 100, 0)) == []


def test_budgets_of_a_round_do_not_wait_for_each_other() -> None:
    rounds = refine(1 << 10, 1 << 20, 15)
    sizes = []
    asked = next(rounds)
    with contextlib.suppress(StopIteration):
        while True:
            sizes.append(len(asked))
            asked = rounds.send([(1e6 / budget, budget) for budget in asked])
    assert sizes == [2, 1, 2, 4, 4, 2]


def test_exploring_asks_no_more_than_it_may() -> None:
    """Every M_peak that gives something new gets its own values of M_save, none below what leaves forward."""
    calls: list[Budgets] = []

    def solve(budgets: Budgets) -> Met:
        calls.append(budgets)
        peak, save = min(budgets[0], 900), min(budgets[1], budgets[0] // 2)
        return Met(1000 / peak + 1000 / save, peak, save)

    answers_of(explore(100, 1000, 40, peaks=5, saves=4), solve)
    assert len(calls) == len(set(calls)) <= 20
    assert len({peak for peak, _ in calls}) == 5
    assert min(save for _, save in calls) == 40
    assert {peak for peak, save in calls if save < peak} == {peak for peak, _ in calls}
    calls.clear()
    answers_of(explore(100, 1000, 40, peaks=5, saves=1), solve)
    assert len(calls) == 5
