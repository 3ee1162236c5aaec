"""Plans within several budgets, from keeping everything to the least memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

from stowage.stages.ir.curve import CurvePoint
from stowage.stages.ir.errors import NO_PLAN
from stowage.stages.ir.plan import PlanSummary
from stowage.stages.solve.goals import Kept, Solve, whole_budget

CLOSEST_BYTES = 1 << 16
"""Budgets that differ by fewer bytes count as equal."""


def point_of(
    budget_bytes: int, solve: Solve, kept: Kept, reserve: Callable[[int], int] = lambda nbytes: 0
) -> CurvePoint:
    """Return the plan within one budget, as a point of the curve.

    Args:
        budget_bytes: bytes of the device.
        solve: makes plans within a budget.
        kept: the step that the slowdown is relative to.
        reserve: the part of a budget that no plan may take.
    """
    try:
        summary = solve(budget_bytes).summary
        return _point(budget_bytes, summary, kept, whole_budget(summary.smallest_feasible_bytes, reserve))
    except NO_PLAN as error:
        return CurvePoint(budget_bytes, False, smallest_feasible_bytes=error.smallest_feasible_bytes)


def spread_points(number: int, smallest: int, largest: int, point: Callable[[int], CurvePoint]) -> list[CurvePoint]:
    """Return plans within so many budgets, closest together where step times differ most.

    Two thirds of the budgets are evenly spaced; each further one halves the longest piece of the line so far.

    Args:
        number: number of budgets, 2 or more.
        smallest: the smallest budget, included.
        largest: the largest budget, included.
        point: makes the point of a budget.

    Returns:
        The points, the largest budget first, with `never_slower_with_more`; fewer where the ends are close.
    """
    steps = max(1, -(-2 * number // 3) - 1)
    even = {largest - (largest - smallest) * k // steps for k in range(steps + 1)}
    found = {budget: point(budget) for budget in sorted(even, reverse=True)}
    while len(found) < number:
        between = _middle(list(found.values()))
        if between is None:
            break
        found[between] = point(between)
    return never_slower_with_more(found.values())


def never_slower_with_more(points: Iterable[CurvePoint]) -> list[CurvePoint]:
    """Return the points with the fastest of the plans that fit each: its own, or one for a smaller budget.

    Planning is in part by rules, so that what is found for more memory can be slower. A plan never takes more than the
    budget that it was made for, so it fits every larger one.

    Args:
        points: points of one curve, in any order.

    Returns:
        The points, the largest budget first.
    """
    found: list[CurvePoint] = []
    best: CurvePoint | None = None
    for point in sorted(points, key=lambda p: p.budget_bytes):
        if best is not None and not (point.feasible and point.step_time_s <= best.step_time_s):
            planned_in_s = point.planned_in_s
            point = replace(best, budget_bytes=point.budget_bytes, planned_in_s=planned_in_s)
        if point.feasible:
            best = point
        found.append(point)
    return found[::-1]


def _middle(points: Sequence[CurvePoint]) -> int | None:
    """Return the budget in the middle of the longest piece of the line; None where all budgets are close enough."""
    known = sorted((p for p in points if p.feasible), key=lambda p: p.budget_bytes)
    pairs = [(a, b) for a, b in pairwise(known) if b.budget_bytes - a.budget_bytes > CLOSEST_BYTES]
    if not pairs:
        return None
    span = known[-1].budget_bytes - known[0].budget_bytes
    low, high = max(pairs, key=lambda pair: _length(pair[0], pair[1], span))
    return (low.budget_bytes + high.budget_bytes) // 2


def _length(low: CurvePoint, high: CurvePoint, span_bytes: int) -> float:
    """Return the length of the line between two points, where both axes count alike."""
    faster = abs(math.log(low.step_time_s / high.step_time_s)) if high.step_time_s > 0 < low.step_time_s else 0.0
    return faster + (high.budget_bytes - low.budget_bytes) / max(span_bytes, 1)


def _point(budget_bytes: int, s: PlanSummary, kept: Kept, smallest_bytes: int) -> CurvePoint:
    return CurvePoint(
        budget_bytes=budget_bytes,
        feasible=True,
        peak_bytes=s.device_peak_bytes,
        step_time_s=s.step_time_s,
        slowdown=s.step_time_s / kept.time_s - 1 if kept.time_s > 0 else 0.0,
        recomputed_bytes=s.recomputed_bytes,
        offload_bytes=s.offload_bytes,
        reload_bytes=s.reload_bytes,
        lower_tier_bytes=s.lower_tier_bytes,
        wait_s=s.wait_s,
        smallest_feasible_bytes=smallest_bytes,
        method=s.method,
        variant=s.variant,
        plan_hash=s.plan_hash,
        planned_within_bytes=budget_bytes,
    )
