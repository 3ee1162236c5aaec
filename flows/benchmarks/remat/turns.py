"""Lets two processes take turns, iteration by iteration: what slows the machine slows both."""

from __future__ import annotations

import itertools
import math
import statistics
from dataclasses import dataclass
from typing import Any

from stowage.flows.benchmarks.child_process import Served

MOST_ROUNDS = 25
"""Number of rounds after which no more are timed, unless they are asked for."""


@dataclass(frozen=True)
class Turns:
    """Times two processes in turns.

    Attributes:
        rounds: iterations timed of each, at least.
        timed_s: seconds until which more short iterations are timed, up to `MOST_ROUNDS`.
    """

    rounds: int
    timed_s: float

    def measure(self, point: Served, eager: Served) -> dict[str, Any]:
        """Measure peak, times and equality of one point beside plain PyTorch; `point` may be plain PyTorch itself."""
        own, theirs = [point.ask([0])], [eager.ask([0])]
        for one, other in self._rounds(point, eager):
            own.append(one)
            theirs.append(other)
        ratios = _ratios(own[1:], theirs[1:])
        return {
            "peak_bytes": own[0]["peak_bytes"],
            "eager_peak_bytes": theirs[0]["peak_bytes"],
            "time_s": statistics.median(a["time_s"] for a in own[1:]),
            "eager_time_s": statistics.median(b["time_s"] for b in theirs[1:]),
            "overhead": statistics.median(ratios) - 1,
            "rounds": len(ratios),
            "equal": [a["digest"] for a in own] == [b["digest"] for b in theirs],
        }

    def compare(self, ours: Served, theirs: Served) -> tuple[float, float]:
        """Compare two processes: return the median of our time over theirs in one round, less 1, and a probability.

        It is how likely chance alone makes ours slower in as many rounds (sign test, one-sided).
        """
        theirs.ask(1)
        ratios = _ratios(*zip(*self._rounds(ours, theirs), strict=True))
        slower = sum(ratio > 1 for ratio in ratios)
        chance = sum(math.comb(len(ratios), k) for k in range(slower, len(ratios) + 1)) / 2 ** len(ratios)
        return statistics.median(ratios) - 1, chance

    def _rounds(self, first: Served, second: Served) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        first.ask(1)  # the first iteration without the profiler is not timed
        found: list[tuple[dict[str, Any], dict[str, Any]]] = []
        seeds = itertools.count(2)
        while not self._enough([one["time_s"] for one, _ in found]):
            seed = next(seeds)
            other = second.ask(seed)
            found.append((first.ask(seed), other))
        return found

    def _enough(self, times_s: list[float]) -> bool:
        """Return whether enough rounds are timed: medians of few short iterations are too uncertain."""
        count = len(times_s)
        return count >= self.rounds and (count >= MOST_ROUNDS or sum(times_s) >= self.timed_s)


def _ratios(ours: Any, theirs: Any) -> list[float]:
    return [a["time_s"] / b["time_s"] for a, b in zip(ours, theirs, strict=True)]
