"""Gathers the headline numbers of a run: what was predicted, what was measured, and plain PyTorch beside both."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import polars as pl

from stowage.stages.ir.plan import EACH_WHOLE, PlanSummary
from stowage.stages.ir.run import MemorySample, StepRecord
from stowage.stages.report.frames import frame_of
from stowage.stages.report.units import NOTHING, percent, ratio, seconds, size, times


@dataclass(frozen=True)
class ReportFacts:
    """Numbers that were measured; None where they were not.

    Attributes:
        peak_bytes, eager_peak_bytes: highest device bytes of the measured iterations, everything included.
        step_s, eager_step_s: median seconds of the iterations that are `timed`.
        compared: iterations whose loss plain PyTorch also computed.
        equal: compared iterations with the same loss, bit for bit.
        loss_difference: the largest difference among compared iterations.
    """

    peak_bytes: int | None
    eager_peak_bytes: int | None
    step_s: float | None
    eager_step_s: float | None
    compared: int
    equal: int
    loss_difference: float


def gather(steps: Sequence[StepRecord], memory: Iterable[MemorySample] = ()) -> ReportFacts:
    """Gather facts from the records of a run; both may be empty."""
    highest = frame_of(MemorySample, memory).group_by("series").agg(pl.col("resident_bytes").max())
    peaks: dict[str, int] = dict(highest.iter_rows())
    measured = max([s.peak_bytes for s in steps if s.peak_bytes >= 0] + [peaks.get("measured", -1)])
    compared = [s for s in steps if not math.isnan(s.eager_loss)]
    medians = frame_of(StepRecord, timed(steps)).select(pl.col("time_s", "eager_time_s").drop_nans().median())
    return ReportFacts(
        peak_bytes=None if measured < 0 else measured,
        eager_peak_bytes=peaks.get("eager"),
        step_s=medians["time_s"].item(),
        eager_step_s=medians["eager_time_s"].item(),
        compared=len(compared),
        equal=sum(same_loss(s) for s in compared),
        loss_difference=max((abs(s.loss - s.eager_loss) for s in compared), default=0.0),
    )


WARM_UP = 3
"""Iterations before times count; the kernel finds pages for the first, and fewer for the next two."""


def timed(steps: Sequence[StepRecord]) -> Sequence[StepRecord]:
    """Return the iterations that say how long one takes.

    Where others exist, they are without the first ones, which get their memory from the system, and without those whose
    memory is recorded, as the profiler takes time.
    """
    later = steps[WARM_UP:] or steps[1:] or steps
    return [s for s in later if s.peak_bytes < 0] or later


SLOW, DEVIATIONS = 1.2, 5.0
"""An iteration is slow that takes so many times the median, and so many median deviations more than it."""


def slow(steps: Sequence[StepRecord]) -> list[StepRecord]:
    """Return outliers among the iterations that are `timed`: something else took the device or the machine."""
    among = [s for s in timed(steps) if not math.isnan(s.time_s)]
    if len(among) < 3:
        return []
    middle = statistics.median(s.time_s for s in among)
    deviation = statistics.median(abs(s.time_s - middle) for s in among)
    return [s for s in among if s.time_s > max(SLOW * middle, middle + DEVIATIONS * deviation)]


def same_loss(step: StepRecord) -> bool:
    """Return whether plain PyTorch's loss was the same number; NaN equals NaN in neither."""
    return step.loss == step.eager_loss


@dataclass(frozen=True)
class FactLine:
    """One row of the headline table, as text."""

    label: str
    plan: str
    eager: str
    ratio: str
    note: str = ""


def headline(summary: PlanSummary, facts: ReportFacts) -> list[FactLine]:
    """Return the rows of the headline table; the prediction for plain PyTorch is that of keep-all."""
    s, f = summary, facts

    def peak(label: str, mine: int | None, eager: int | None, note: str) -> FactLine:
        return FactLine(label, size(mine), size(eager), times(ratio(mine, eager)), note)

    def time(label: str, mine: float | None, eager: float | None, note: str) -> FactLine:
        return FactLine(label, seconds(mine), seconds(eager), times(ratio(mine, eager)), note)

    spare = s.device_budget_bytes - (s.device_peak_bytes if f.peak_bytes is None else f.peak_bytes)
    moved = [
        FactLine(
            "Below the device", size(s.lower_tier_bytes), NOTHING, NOTHING,
            f"each step moves {size(s.offload_bytes)} down, {size(s.reload_bytes)} up, and waits {seconds(s.wait_s)}",
        )
    ]  # fmt: skip
    return [
        FactLine(
            "Device budget", size(s.device_budget_bytes), NOTHING, NOTHING,
            f"{size(spare)} to spare" if spare >= 0 else f"exceeded by {size(-spare)}",
        ),
        peak("Predicted peak", s.device_peak_bytes, s.keep_all_peak_bytes,
             f"{size(s.baseline_bytes)} of it parameters, states, buffers and inputs"),
        peak("Measured peak", f.peak_bytes, f.eager_peak_bytes, off_by(f.peak_bytes, s.device_peak_bytes)),
        time("Predicted step time", s.step_time_s, s.keep_all_time_s,
             f"{percent(overhead(s))} above the lower bound of {seconds(s.least_s)}"),
        time("Measured step time", f.step_s, f.eager_step_s, off_by(f.step_s, s.step_time_s)),
        *(moved if s.lower_tier_bytes else []),
        *_in_fewer_bits(s),
    ]  # fmt: skip


def _in_fewer_bits(summary: PlanSummary) -> list[FactLine]:
    """Return a row for each class of tensors that is kept in fewer bits; the first says what the gradient pays."""
    changed = f"the gradient changes by {percent(summary.gradient_error)} at most"
    return [
        FactLine("Kept in fewer bits" if not i else "", kept.partition(": ")[0], NOTHING, NOTHING,
                 kept.partition(": ")[2] + (f" ({effect})" if effect else "")
                 + (f"; {changed}" if not i and not summary.exact else ""))
        for i, (kept, effect) in enumerate(summary.kept_in_codes)
    ]  # fmt: skip


def overhead(summary: PlanSummary) -> float | None:
    """Return the predicted step time above its lower bound, as a fraction of the bound."""
    bound = summary.least_s
    return (summary.step_time_s - bound) / bound if bound > 0 else None


def bound_words(summary: PlanSummary) -> str:
    """Say what is proven: that no schedule takes less, or only that no operation can be left out."""
    if not summary.bound_cuts:
        return "every operation once"
    cuts = len(summary.bound_cuts)
    places = "one place" if cuts == 1 else f"{cuts} places"
    ways = f"the {summary.bound_variant} step"
    if "," in summary.bound_variant:
        ways = f"all mixtures of {summary.bound_variant}"
    if EACH_WHOLE in summary.bound_variant:
        ways = f"{summary.bound_variant}, each as a whole and not all mixtures of them,"
    if summary.bound_kind == "cuts under masks":
        return (
            f"no plan within the budget under every mask has a lower mean time (proven by cutting {ways} at {places})"
        )
    moved = ", whatever it copies and wherever it updates" if summary.bound_kind == "cuts with transfers" else ""
    return f"no schedule within the budget takes less{moved} (proven by cutting {ways} at {places})"


def off_by(measured: float | None, predicted: float) -> str:
    """Say how far a measurement is from its prediction."""
    if measured is None:
        return "not measured"
    if predicted <= 0:
        return ""
    return f"{100 * (measured - predicted) / predicted:+.1f}% against the prediction"


def verdict(facts: ReportFacts) -> str:
    """Say in one sentence whether the losses are equal."""
    f = facts
    if not f.compared:
        return "The losses were not compared with plain PyTorch."
    if f.equal == f.compared:
        return f"All {f.compared} compared losses equal plain PyTorch's, bit for bit."
    return (
        f"{f.equal} of {f.compared} compared losses equal plain PyTorch's; "
        f"the largest difference is {f.loss_difference:.3g}."
    )
