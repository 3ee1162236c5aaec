"""Turns timed executions into the time that a call adds to a step."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence

OUTLIERS = 0.1
"""Share of a call's samples, the slowest ones, that are left out: most of them were interrupted."""


def typical_s(samples: Iterable[float]) -> float:
    """Return the mean without outliers, of at least one sample."""
    ascending = sorted(samples)
    return statistics.fmean(ascending[: len(ascending) - int(OUTLIERS * len(ascending))])


def weigh(samples: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the time of each call, in seconds.

    It is the typical time, times one factor for all calls, so that together they take as long as they did. Whatever
    interrupts a process hits its calls in proportion to their time, and not the ones whose samples it happened to hit.
    """
    typical = {name: typical_s(times) for name, times in samples.items()}
    took = sum(sum(times) for times in samples.values())
    expected = sum(typical[name] * len(times) for name, times in samples.items())
    return {name: time_s * took / expected for name, time_s in typical.items()} if expected else typical
