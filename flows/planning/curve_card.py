"""Answers in one line whether a step fits a card that is not at hand, and says what the answer rests on."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from stowage.flows.planning.curve import CurvePlanner
from stowage.flows.planning.curve_result import CardAnswer, Verdict
from stowage.stages.device.cards import Card
from stowage.stages.ir.costs import DeviceDescription
from stowage.stages.ir.defaults import O_ILP_SEARCHES
from stowage.stages.ir.errors import Infeasible, NoRoomInLowerTier, StowageError
from stowage.stages.report.units import GIB, size
from stowage.stages.solve import LowerTier, lower_tier_of

UNSURE = 0.10
"""The uncertainty of activations' bytes, as a fraction: the card may have other operators than the CPU."""

SEARCHES = 1
"""Searches with O-ILP for one plan on a card that is only described: an estimate need not take minutes a budget."""

_SEARCHES = (
    f"plans with RAM are of {SEARCHES} search with O-ILP; `fit` makes up to {O_ILP_SEARCHES}, and may find faster ones"
)

LARGEST = 4096
"""The largest batch, in samples, that an answer names."""


@dataclass(frozen=True)
class Growth:
    """Says how the memory of plain PyTorch grows with the batch.

    Attributes:
        samples: number of samples of the batch that was planned.
        twice_bytes: peak of plain PyTorch with twice as many samples.
    """

    samples: int
    twice_bytes: int


def room_of(target: DeviceDescription) -> int:
    """Return the bytes of a card that a budget may take."""
    return target.memory_bytes - target.context_bytes


def host_as_lower_tier(target: DeviceDescription) -> LowerTier:
    """Return a lower tier of pinned RAM that has room for anything."""
    lower_tier = lower_tier_of(target, host_budget=1 << 40, disk_budget=None, offload_dir=None)
    if lower_tier is None:
        raise AssertionError("a host budget gives a tier")
    return lower_tier.boundless()


def answer_of(
    card: Card,
    dtype: str,
    planner: CurvePlanner,
    with_ram: Callable[[], CurvePlanner],
    growth: Growth | StowageError,
) -> tuple[CardAnswer, CurvePlanner]:
    """Answer whether the step fits, and return the planner whose curve says more.

    Asked again after that curve was planned, it costs nothing and names the fastest of all plans that were found.

    Args:
        card: the card as it is described.
        dtype: type of the matrix products.
        planner: plans without RAM behind the card.
        with_ram: makes the planner that uses RAM.
        growth: how memory grows with the batch; or why that is not known.
    """
    room = room_of(planner.costed.target)
    verdict: Verdict = "plainly"
    chosen, line = planner, "fits plainly"
    if planner.costed.eager_peak_bytes + planner.reserve(room) > room:
        try:
            summary = planner.fastest(room).summary
            verdict, line = "planned", f"fits at {_slower(summary.step_time_s, planner)}"
        except Infeasible as failure:
            chosen = with_ram()
            try:
                summary = chosen.fastest(room).summary
                verdict = "with_ram"
                line = (
                    f"needs {_size(summary.lower_tier_bytes)} of RAM (pinned), and then fits at "
                    f"{_slower(summary.step_time_s, chosen)}, moving "
                    f"{_size(summary.offload_bytes + summary.reload_bytes)} over PCIe each step"
                )
            except Infeasible as error:
                least = min(failure.smallest_feasible_bytes, error.smallest_feasible_bytes)
                verdict, line = "no", f"does not fit: the least memory that any plan takes is {_size(least)}"
            except NoRoomInLowerTier as error:
                least = min(failure.smallest_feasible_bytes, error.smallest_feasible_bytes)
                verdict = "no"
                line = (
                    f"does not fit: it needs {_size(error.needed_bytes)} of RAM (pinned), more than plans may "
                    f"use; with what they may use, the least memory that any plan takes is {_size(least)}"
                )
    answer = CardAnswer(
        verdict=verdict,
        line=f"{line} ({card.name}, {_size(room)} of it usable; an estimate)",
        budget_bytes=room,
        batch_sizes=_batch_sizes(growth, planner, room),
        assumptions=(
            *card.assumptions(dtype),
            *([_SEARCHES] if chosen.how.lower_tier and chosen.how.effort.o_ilp_searches < O_ILP_SEARCHES else []),
        ),
    )
    return answer, chosen


def _size(nbytes: int) -> str:
    """Return bytes as GiB with one decimal, or as MiB where that says more."""
    return f"{nbytes / GIB:.1f} GiB" if nbytes >= GIB / 2 else size(nbytes)


def _slower(step_time_s: float, planner: CurvePlanner) -> str:
    return f"{100 * (step_time_s / planner.kept.time_s - 1):+.1f}%"


def _batch_sizes(growth: Growth | StowageError, planner: CurvePlanner, room: int) -> str:
    """Write the ranges of batch sizes in a line."""
    if isinstance(growth, StowageError):
        return f"batch sizes: not known: {growth}"
    eager = planner.costed.eager_peak_bytes
    each = (growth.twice_bytes - eager) / growth.samples
    if each <= 0:
        return "batch sizes: memory does not grow with the batch"
    usable = room - planner.reserve(room)
    plain = _range(eager, each, growth.samples, usable)
    try:
        least = planner.solve(room).summary.smallest_feasible_bytes
    except Infeasible as failure:
        least = failure.smallest_feasible_bytes - planner.reserve(failure.smallest_feasible_bytes)
    # Parameters, gradients and states do not grow. Plans may free gradients early, and then less is fixed.
    fixed = eager - each * growth.samples
    if fixed >= least:
        fixed = sum(s.nbytes for s in planner.costed.variants[0].trace.storages if s.role in ("parameter", "state"))
    planned = _range(least, max(0.0, least - fixed) / growth.samples, growth.samples, usable)
    return f"batch sizes: {_text(plain)} without a plan, {_text(planned)} with one, in the card alone"


def _range(at_bytes: float, each: float, samples: int, usable: int) -> tuple[int, int]:
    """Return the largest batch if samples take more memory than was found, and if they take less."""
    fixed = at_bytes - each * samples
    if each <= 0:
        return LARGEST, LARGEST
    low, high = (max(0, math.floor((usable - fixed) / (each * f))) for f in (1 + UNSURE, 1 - UNSURE))
    return min(low, LARGEST), min(high, LARGEST)


def _text(sizes: tuple[int, int]) -> str:
    low, high = sizes
    if high == 0:
        return "none"
    return f"up to {low}" if low == high else f"up to {low}–{high}"
