"""Budgets of tiny steps: from the least in which any schedule fits to that in which nothing need run again."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

from hypothesis import strategies as st

from stowage.stages.formulations.cuts.step_graph import StepGraph
from tests.formulations.cuts.every_schedule import fastest
from tests.formulations.cuts.tiny_steps import peak_bytes, tiny_steps

AGAIN = 1 + 1e-9
"""Relative time from which on something runs again: the same times may be added up in another order."""

TRIES = 6
"""Steps of which the first is taken that may have to run something again: of most there is no such budget."""


@dataclass(frozen=True)
class Limits:
    """The least budget in which a schedule fits, and the least in which every node runs once."""

    least: int
    enough: int


def limits_of(step: StepGraph) -> Limits:
    """Both budgets of a step, by the search through all schedules."""
    whole = peak_bytes(step)
    least = _first(lambda budget: fastest(step, budget) < math.inf, step.base_bytes, whole)
    return Limits(least, _first(lambda budget: fastest(step, budget) <= step.once_s * AGAIN, least, whole))


def _first(holds: Callable[[int], bool], low: int, high: int) -> int:
    """The least number for which something holds, as it does for all that are larger, and for the last."""
    return low + bisect_left(range(low, high), True, key=holds)


@st.composite
def steps_within(draw: st.DrawFn, max_nodes: int = 7) -> tuple[StepGraph, int]:
    """A step, and a budget within which it must run something again; now and then any budget, or no such step."""
    for _ in range(TRIES):
        step = draw(tiny_steps(max_nodes))
        limits = limits_of(step)
        if limits.least < limits.enough and draw(st.integers(0, 9)) < 9:
            return step, draw(st.integers(limits.least, limits.enough - 1))
    return step, draw(st.integers(limits.least - 1, limits.enough + 1))


def binds(step: StepGraph, optimum_s: float) -> bool:
    """Whether the fastest schedule runs something again."""
    return step.once_s * AGAIN < optimum_s < math.inf
