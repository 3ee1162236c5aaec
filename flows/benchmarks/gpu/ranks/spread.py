"""Puts together what the rounds of one contestant took: medians and quartiles of all of its steps."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from stowage.flows.benchmarks.gpu.steps import CommandStep, StepResult


@dataclass(frozen=True)
class Spread:
    """The median of some times, and their quartiles.

    Attributes:
        low_s: a quarter of them are shorter.
        median_s: half of them are.
        high_s: a quarter of them are longer.
    """

    low_s: float
    median_s: float
    high_s: float


def spread_of(seconds: Sequence[float]) -> Spread:
    """Return median and quartiles."""
    if len(seconds) < 2:
        return Spread(seconds[0], seconds[0], seconds[0])
    low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return Spread(low, middle, high)


def spread_of_rounds(step: CommandStep, steps: Iterable[CommandStep], results: Mapping[str, StepResult]) -> Spread:
    """Return those of a contestant's steps of training, of all of its rounds that held."""
    seconds: list[float] = []
    for other in steps:
        result = results.get(other.name)
        if other.asked.get("again", other.name) == step.name and result is not None and result.status == "held":
            seconds += result.numbers.get("seconds", ())  # none where nothing fitted its budget
    return spread_of(seconds)
