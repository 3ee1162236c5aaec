"""Chooses the budgets that an H-Graph is solved for.

The thesis spaces them evenly between a bound that may not be feasible and plain PyTorch's peak (2.6.0.0.1): many of
them then have the same answer, while the steep part of the front, at small budgets, gets few. Here solving begins at
both ends of what is feasible, and goes on where the answers leave most open: between two neighbours lies a rectangle
(seconds by which they differ × ratio of their memory) that the front must cross, and the largest are cut at their
geometric middle. An answer that takes less than its budget leaves nothing open between the two.

Budgets are asked in rounds: those of one round do not wait for each other, so that they may be solved in parallel.
`refine` and `explore` are generators that yield what to solve and are sent the answers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from stowage.stages.formulations.cluster.answer import Budgets

Asked = TypeVar("Asked")
Answer = TypeVar("Answer")

CUTS = 4
"""Number of rectangles cut in one round, independent of the number of workers, so that results are reproducible."""


@dataclass(frozen=True)
class Met:
    """Time and memory of the fastest schedule found within budgets."""

    time_s: float
    peak_bytes: int
    save_bytes: int


def refine(low: int, high: int, count: int) -> Generator[list[int], Sequence[tuple[float, int] | None], None]:
    """Yield rounds of at most `count` budgets between `low` and `high`.

    After each round it is sent, for each budget, the seconds of its answer and the bytes it takes, or None where there
    is none.

    Args:
        low: the smallest feasible budget or close to it, bytes.
        high: the largest budget, bytes.
        count: number of budgets, those without an answer included.
    """
    solved: dict[int, tuple[float, int] | None] = {}
    asked = list(dict.fromkeys((high, low)))[:count]
    while asked:
        found = yield asked
        solved.update(zip(asked, found, strict=True))
        asked = _widest(solved)[: min(CUTS, count - len(solved))]


def explore(
    smallest_peak: int, largest_peak: int, leaving: int, peaks: int, saves: int
) -> Generator[list[Budgets], Sequence[Met | None], None]:
    """Yield rounds of pairs of budgets.

    These are `peaks` values of M_peak without a limit on what is saved, and for each that gives something new up to
    `saves` values of M_save, from what leaves forward to what that schedule saves.

    Args:
        smallest_peak: the smallest feasible peak or close to it, bytes.
        largest_peak: the largest peak, bytes.
        leaving: bytes of what leaves forward.
        peaks: number of values of M_peak.
        saves: number of values of M_save for each; there are at most `peaks` × `saves` pairs.
    """
    met: dict[int, Met] = {}
    rounds = refine(smallest_peak, largest_peak, peaks)
    asked = next(rounds, [])
    while asked:
        found = yield [(peak, peak) for peak in asked]
        met.update({peak: one for peak, one in zip(asked, found, strict=True) if one is not None})
        asked = _send(rounds, [None if one is None else (one.time_s, one.peak_bytes) for one in found])
    distinct = {one: peak for peak, one in sorted(met.items()) if one.save_bytes > leaving}
    inside = {peak: refine(leaving, one.save_bytes - 1, saves - 1) for one, peak in distinct.items()}
    open_ = {peak: next(rounds, []) for peak, rounds in inside.items()}
    while pairs := [(peak, save) for peak, budgets in open_.items() for save in budgets]:
        answers = dict(zip(pairs, (yield pairs), strict=True))
        for peak, budgets in open_.items():
            if budgets:
                mine = [answers[peak, save] for save in budgets]
                open_[peak] = _send(inside[peak], [None if a is None else (a.time_s, a.save_bytes) for a in mine])


def _send(rounds: Generator[list[Asked], Answer, None], answer: Answer) -> list[Asked]:
    """Return the next round; empty at the end."""
    try:
        return rounds.send(answer)
    except StopIteration:
        return []


def _widest(solved: dict[int, tuple[float, int] | None]) -> list[int]:
    """Return the budgets in the middle of the rectangles between neighbours, largest rectangle first."""
    found: list[tuple[float, int]] = []
    for small, large in itertools.pairwise(sorted(solved)):
        below, above = solved[small], solved[large]
        if above is None or above[1] <= small:
            continue
        middle = math.isqrt(max(1, small) * above[1])
        if not small < middle < above[1]:
            continue
        # Where the smaller budget has no answer, the front ends between them: count half the larger one's time.
        seconds = above[0] / 2 if below is None else below[0] - above[0]
        if seconds > 0:
            found.append((seconds * math.log(above[1] / max(1, small)), middle))
    return [middle for _, middle in sorted(found, key=lambda one: -one[0])]
