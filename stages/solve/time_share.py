"""Says how long what comes on top of planning may take: a share of what planning has taken so far."""

from __future__ import annotations

import math

CUTS = 0.12
"""Share of the time that planning took so far which cuts may take."""

EVICTION = 0.04
"""Share of it which greedy eviction may take, in all ways to compute the step together."""

LEAST_SECONDS = 0.1
"""Time that each may take however fast planning was: enough for one cut, or all rules, of a small step."""


def share_of_planning(share: float, planning_since_s: float | None, now_s: float) -> float:
    """Return the seconds that one of them may take; infinite where nobody says when planning began.

    Args:
        share: one of the shares above.
        planning_since_s: see `PlanRequest`.
        now_s: the clock of `time.monotonic`.
    """
    return math.inf if planning_since_s is None else max(LEAST_SECONDS, share * (now_s - planning_since_s))
