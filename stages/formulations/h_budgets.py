"""Which budgets an H-Graph is solved for.

The thesis spaces them evenly between a bound that may not be feasible and plain PyTorch's peak (2.6.0.0.1): many of
them then have the same answer, while the steep part of the front, at small budgets, is met by few. Here solving begins
at both ends of what is feasible, and goes on where the answers leave most open: between two neighbours lies a rectangle
(seconds by which they differ × ratio of their memory) that the front must cross, and the largest is cut at its
geometric middle. An answer that takes less than its budget leaves nothing open between the two.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import TypeVar

from stowage.stages.formulations.h_answer import HAnswer
from stowage.stages.formulations.h_policies import keep_all
from stowage.stages.formulations.h_problem import HProblem
from stowage.stages.formulations.h_staged import HStagedCost, cost_of, timeline

Answer = TypeVar("Answer")
Solve = Callable[[int], "tuple[Answer, float, int] | None"]
"""Budget -> answer, its seconds, and the bytes it takes; None where there is none."""


def refine(solve: Solve[Answer], low: int, high: int, count: int) -> list[Answer]:
    """Answers for at most `count` budgets between `low` and `high`, largest budget first.

    Args:
        solve: called once for each budget.
        low, high: bytes; `low` should be the smallest feasible budget or close to it.
        count: solves, those without an answer included.
    """
    solved: dict[int, tuple[Answer, float, int] | None] = {}
    for budget in (high, low):
        if len(solved) < count and budget not in solved:
            solved[budget] = solve(budget)
    while len(solved) < count:
        middle = _widest(solved)
        if middle is None:
            break
        solved[middle] = solve(middle)
    found = [solved[budget] for budget in sorted(solved, reverse=True)]
    return [answer[0] for answer in found if answer is not None]


def explore(
    data: HProblem, solve: Callable[[int, int], HAnswer], smallest_peak: int, peaks: int, saves: int
) -> list[HAnswer]:
    """Answers over both budgets: `peaks` values of M_peak without a limit on what is saved, and for each that gives a
    new schedule up to `saves` values of M_save, from what leaves forward to what that schedule saves.

    `solve(peak, save)` is called at most `peaks` × `saves` times; answers come without repetitions, in order of calls.
    """
    leaving = sum(data.nbytes[d] for d in set(data.graph.nodes[data.graph.loss].reads))
    found: dict[tuple[object, ...], HAnswer] = {}

    def at(peak_bytes: int, save_bytes: int) -> tuple[HAnswer, HStagedCost] | None:
        answer = solve(peak_bytes, save_bytes)
        if answer.runs is None:
            return None
        cost = cost_of(data, timeline(data, answer.runs))
        found.setdefault(tuple((k, tuple(runs)) for k, runs in sorted(answer.runs.items())), answer)
        return answer, cost

    def at_peak(peak_bytes: int) -> tuple[tuple[HAnswer, HStagedCost], float, int] | None:
        both = at(peak_bytes, peak_bytes)
        return None if both is None else (both, both[1].time_s, both[1].peak_bytes)

    for answer, cost in refine(at_peak, smallest_peak, keep_all(data).cost.peak_bytes, peaks):
        peak_bytes = answer.budgets[0]

        def at_save(save_bytes: int, peak_bytes: int = peak_bytes) -> tuple[HAnswer, float, int] | None:
            both = at(peak_bytes, save_bytes)
            return None if both is None else (both[0], both[1].time_s, both[1].save_bytes)

        if saves > 1 and cost.save_bytes > leaving:
            refine(at_save, leaving, cost.save_bytes - 1, saves - 1)
    return list(found.values())


def _widest(solved: dict[int, tuple[Answer, float, int] | None]) -> int | None:
    """The budget in the middle of the largest rectangle between neighbours; None where nothing is open."""
    best: tuple[float, int] | None = None
    budgets = sorted(solved)
    for small, large in itertools.pairwise(budgets):
        below, above = solved[small], solved[large]
        if above is None or above[2] <= small:
            continue
        middle = math.isqrt(max(1, small) * above[2])
        if not small < middle < above[2]:
            continue
        # Where the smaller budget has no answer, the front ends somewhere between: worth half of what it costs there.
        seconds = above[1] / 2 if below is None else below[1] - above[1]
        area = seconds * math.log(above[2] / max(1, small))
        if seconds > 0 and (best is None or area > best[0]):
            best = area, middle
    return None if best is None else best[1]
