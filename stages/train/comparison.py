"""Compares training under the plan with plain PyTorch: records side by side, metrics, and whether losses are equal."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from stowage.stages.ir.errors import StaleStep
from stowage.stages.ir.plan import PlanSummary
from stowage.stages.ir.run import StepRecord
from stowage.stages.report.facts import timed

ROUNDING = 1e-3
"""The largest relative difference of losses that comes from adding the gradients of ranks in another order."""


def compare(planned: Sequence[StepRecord], eager: Sequence[StepRecord]) -> list[StepRecord]:
    """Put eager's loss and time beside the plan's."""
    by_iteration = {r.iteration: r for r in eager}
    return [
        replace(r, eager_loss=by_iteration[r.iteration].loss, eager_time_s=by_iteration[r.iteration].time_s)
        if r.iteration in by_iteration
        else r
        for r in planned
    ]


def same(loss: float, other: float) -> bool:
    """Return whether two losses are equal bit for bit, all NaN alike."""
    return loss == other or (math.isnan(loss) and math.isnan(other))


def unequal(planned: Sequence[StepRecord], eager: Sequence[StepRecord]) -> list[StepRecord]:
    """Return steps under the plan whose loss is not plain PyTorch's; none if that was not run."""
    losses = {r.iteration: r.loss for r in eager}
    return [r for r in planned if r.iteration in losses and not same(r.loss, losses[r.iteration])]


def require_equal(planned: Sequence[StepRecord], eager: Sequence[StepRecord]) -> None:
    """Fail if the run under the plan has other numbers.

    Raises:
        StaleStep: the losses of a step differ.
    """
    wrong = unequal(planned, eager)
    if not wrong:
        return
    first = wrong[0]
    plain = next(r.loss for r in eager if r.iteration == first.iteration)
    raise StaleStep(
        f"{len(wrong)} of {len(planned)} losses under the plan are not plain PyTorch's, the first in step "
        f"{first.iteration}: {first.loss!r}, and not {plain!r}. Something that the step reads has changed since it was "
        "traced, or two runs of plain PyTorch differ too: make it again with `dvc repro --force trace`, and pass what "
        "changes in the batch.",
        first.iteration + 1,
    )


def require_near(planned: Sequence[StepRecord], plain: Sequence[StepRecord]) -> str:
    """Return a sentence on how far the losses of many ranks are from those of DistributedDataParallel.

    More than two gradients can be added in several orders, and the two add them in different ones.

    Raises:
        StaleStep: they are further apart than rounding explains.
    """
    losses, furthest = {r.iteration: r.loss for r in plain}, 0.0
    for record in unequal(planned, plain):
        loss = losses[record.iteration]
        far = abs(record.loss - loss) / max(abs(loss), 1e-12)
        if not far <= ROUNDING:
            raise StaleStep(
                f"The loss of step {record.iteration} under the plan is {record.loss!r}, and plain PyTorch's {loss!r}, "
                "which is further than another order of adding explains: make the plan again with `dvc repro --force "
                "trace`.",
                record.iteration + 1,
            )
        furthest = max(furthest, far)
    if not furthest:
        return ""
    return (
        f"Losses differ from those of DistributedDataParallel by at most {furthest:.1e} of them: it adds the gradients "
        "of the ranks in another order."
    )


def median_time_s(records: Sequence[StepRecord]) -> float:
    """Return the median time of the iterations that say how long one takes."""
    return statistics.median([r.time_s for r in timed(list(records))] or [math.nan])


def metrics_of(summary: PlanSummary, records: Sequence[StepRecord], eager: Sequence[StepRecord]) -> dict[str, Any]:
    """Return the metrics that `dvc metrics` shows."""
    peaks = [r.peak_bytes for r in records if r.peak_bytes >= 0]
    eager_peaks = [r.peak_bytes for r in eager if r.peak_bytes >= 0]
    metrics: dict[str, Any] = {
        "device_budget_bytes": summary.device_budget_bytes,
        "predicted_peak_bytes": summary.device_peak_bytes,
        "measured_peak_bytes": max(peaks) if peaks else None,
        "predicted_step_time_s": summary.step_time_s,
        "measured_step_time_s": median_time_s(records),
        "final_loss": records[-1].loss,
    }
    on_gpu = [r for r in records if r.reserved_bytes >= 0]
    if on_gpu:
        metrics |= {
            "reserve_bytes": summary.reserve_bytes,
            "requested_peak_bytes": max(r.requested_bytes for r in on_gpu),
            "reserved_peak_bytes": max(r.reserved_bytes for r in on_gpu),
            "allocation_retries": sum(r.retries for r in on_gpu),
        }
    if eager:
        metrics |= {
            "eager_peak_bytes": max(eager_peaks) if eager_peaks else None,
            "eager_step_time_s": median_time_s(eager),
            "step_time_over_eager": median_time_s(records) / median_time_s(eager),
            "losses_equal": not unequal(records, eager),
        }
    return metrics
