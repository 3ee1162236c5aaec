"""From timed executions to the time that a call adds to a step."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence

OUTLIERS = 0.1
"""Of the samples of a call, the slowest such part does not say what it costs: most were interrupted."""


def typical_s(samples: Iterable[float]) -> float:
    """The mean without outliers, of at least one sample."""
    ascending = sorted(samples)
    return statistics.fmean(ascending[: len(ascending) - int(OUTLIERS * len(ascending))])


def weigh(samples: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Time of each call, seconds: typical ones, times one factor for all so that together they take as long as they
    did. What interrupts a process hits its calls by how long they take, not those on which a sample caught it."""
    typical = {name: typical_s(times) for name, times in samples.items()}
    took = sum(sum(times) for times in samples.values())
    expected = sum(typical[name] * len(times) for name, times in samples.items())
    return {name: time_s * took / expected for name, time_s in typical.items()} if expected else typical
