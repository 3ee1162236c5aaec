"""Finds the budgets that planning can find: the least that any plan takes, and the least at a slowdown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from stowage.stages.ir.errors import NO_PLAN, ParameterError, size_text
from stowage.stages.ir.freezable import Freezable
from stowage.stages.settings.budgets import kind_of_budget, parse_slowdown
from stowage.stages.settings.sizes import MOST_BYTES
from stowage.stages.solve.at_once import keep_everything_at_once
from stowage.stages.solve.frozen import freezing_plan
from stowage.stages.solve.request import PlanRequest
from stowage.stages.solve.summary import Solved
from stowage.stages.solve.variants import Variant

Solve = Callable[[int], Solved]
"""Returns the plan within so many bytes of the device; raises `Infeasible`, or `NoRoomInLowerTier`."""

NOTCHES = 64
"""Resolution of `least_at`: budgets between the least memory and that of keeping everything."""

WORTH_ASKING = 1e-3
"""Share of a budget that a plan must leave unused for another to be asked for."""

_TIGHTER = 8
"""Times to ask again: a plan for the least memory may show that less is enough."""


@dataclass(frozen=True)
class Sought:
    """A budget that was found.

    Attributes:
        nbytes: bytes of the device.
        said: how it was found, for people.
    """

    nbytes: int
    said: str


@dataclass(frozen=True)
class Kept:
    """The step with everything kept, which others are compared with.

    Attributes:
        nbytes: budget of the device within which it runs.
        time_s: its predicted time.
    """

    nbytes: int
    time_s: float


def kept_of(
    variant: Variant, reserve: Callable[[int], int] = lambda nbytes: 0, freezable: Freezable | None = None
) -> Kept:
    """Return the step as it was recorded, with everything kept.

    Args:
        variant: the trace as recorded.
        reserve: the part of a budget that no plan may take.
        freezable: what may be frozen: memory is then that of the worst choice, and time that of the mean one.
    """
    solved = keep_everything_at_once(variant.trace, variant.nodes, PlanRequest(device_budget_bytes=MOST_BYTES))
    if solved is None:
        raise AssertionError("a step that keeps everything does not fit any memory")
    if freezable is not None:
        solved = freezing_plan(variant.trace, variant.nodes, solved, freezable, MOST_BYTES)
    return Kept(whole_budget(solved.summary.device_peak_bytes, reserve), solved.summary.step_time_s)


def whole_budget(usable_bytes: int, reserve: Callable[[int], int]) -> int:
    """Return the budget that leaves so much to a plan; the reserve is in part a share of the budget."""
    nbytes = usable_bytes
    for _ in range(60):
        if usable_bytes + reserve(nbytes) <= nbytes:
            break
        nbytes = usable_bytes + reserve(nbytes)
    return nbytes


def sought_budget(budget: str | int, solve: Solve, kept: Kept, quick: Solve | None = None) -> Sought:
    """Return the budget that `smallest` or `+5%` stands for.

    Args:
        budget: the budget as people write it.
        solve: makes plans within a budget.
        kept: the step that the slowdown is relative to.
        quick: see `least`.

    Raises:
        ParameterError: it is neither, or no plan is as fast as that.
    """
    kind = kind_of_budget(budget)
    if kind == "smallest":
        return Sought(least(solve, quick), "the least memory for which a plan was found")
    if kind == "slowdown":
        return least_at(parse_slowdown(str(budget)), solve, kept, quick)
    raise ParameterError(f"device_budget {budget!r} is not one that is found by planning: write 'smallest' or '+5%'.")


def least(solve: Solve, quick: Solve | None = None) -> int:
    """Return the least memory for which a plan was found.

    Args:
        solve: makes plans within a budget.
        quick: makes plans in less time, and not so good ones. The search is then done with it, and `solve` is asked
            only for what it found. Without it `solve` has no plan with less.
    """
    if quick is None:
        return _tightest(solve)
    nbytes = _tightest(quick)
    for _ in range(_TIGHTER):
        try:
            found = solve(nbytes)
        except NO_PLAN as error:
            nbytes = max(error.smallest_feasible_bytes, nbytes + 1)
        else:
            return _below(solve, nbytes, found)
    return nbytes


def _below(solve: Solve, nbytes: int, found: Solved) -> int:
    """Go down to what plans say of themselves: `solve` may need less than the quick search knew."""
    for _ in range(_TIGHTER):
        stated = min(found.summary.device_peak_bytes, found.summary.smallest_feasible_bytes or nbytes)
        if stated > (1 - WORTH_ASKING) * nbytes:
            break
        try:
            found = solve(stated)
            nbytes = stated
        except NO_PLAN as error:
            named = error.smallest_feasible_bytes
            if named >= nbytes:
                break
            try:
                found = solve(named)
                nbytes = named
            except NO_PLAN:
                break
    return nbytes


def _tightest(solve: Solve) -> int:
    """Return the least memory for which `solve` has a plan; with less it has none."""
    try:
        solve(1)
        return 1
    except NO_PLAN as error:
        nbytes = error.smallest_feasible_bytes
    for _ in range(_TIGHTER):
        named = _lacking(solve, nbytes)
        if named is not None:
            nbytes = max(named, nbytes + 1)
            continue
        nbytes, named = _lowest(solve, nbytes)
        if named >= nbytes:
            return nbytes
        nbytes = named
    return nbytes


def _lowest(solve: Solve, high: int) -> tuple[int, int]:
    """Return a budget, `high` at most, that has a plan where a byte less has none, and what that failure names.

    Rules find plans for somewhat less than the least that they named: it is searched ever further down, and halved.
    """
    step, low = 1, high - 1
    named = _lacking(solve, low)
    while named is None and low > 1:
        high, step = low, 2 * step
        low = max(1, high - step)
        named = _lacking(solve, low)
    while high - low > 1:
        middle = (low + high) // 2
        failed = _lacking(solve, middle)
        if failed is None:
            high = middle
        else:
            low, named = middle, failed
    return high, high if named is None else named


def _lacking(solve: Solve, nbytes: int) -> int | None:
    """Return the least budget that is named where this one has no plan, and None where it has one."""
    try:
        solve(nbytes)
    except NO_PLAN as error:
        return error.smallest_feasible_bytes
    return None


def least_at(slowdown: float, solve: Solve, kept: Kept, quick: Solve | None = None) -> Sought:
    """Return the least memory with which a step takes at most `slowdown` longer than with everything kept.

    It is found by bisection over `NOTCHES` budgets between the least memory and that of keeping everything: with a
    notch less, the step is slower than that, or there is no plan.

    Args:
        slowdown: the slowdown as a fraction.
        solve: makes plans within a budget.
        kept: the step that the slowdown is relative to.
        quick: see `least`.

    Raises:
        Infeasible: no budget has a plan.
        ParameterError: no plan is as fast as that.
    """
    bottom = least(solve, quick)
    notch = max(1, -(-(kept.nbytes - bottom) // NOTCHES))

    def fast(notches: int) -> bool:
        try:
            return solve(bottom + notches * notch).summary.step_time_s <= (1 + slowdown) * kept.time_s
        except NO_PLAN:
            return False

    slow, enough = -1, max(0, -(-(kept.nbytes - bottom) // notch))
    if not fast(enough):
        raise ParameterError(
            f"device_budget '+{100 * slowdown:g}%' cannot be met: no plan by this method is as fast as that; ask for a "
            "larger slowdown, or give a budget in bytes."
        )
    while enough - slow > 1:
        middle = (slow + enough) // 2
        if fast(middle):
            enough = middle
        else:
            slow = middle
    said = (
        f"the least memory with which a step takes at most {100 * slowdown:g}% longer than with everything kept, "
        f"in notches of {size_text(notch)} above {size_text(bottom)}"
    )
    return Sought(bottom + enough * notch, said)
