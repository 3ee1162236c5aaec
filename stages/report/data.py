"""Makes tables of a report's curves, which DVC plots: those of several revisions are drawn over each other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import polars as pl

from stowage.stages.ir.files import write_atomically
from stowage.stages.ir.plan import PlanRow
from stowage.stages.ir.run import MemorySample, StepRecord
from stowage.stages.report.curves import PlotLine, measured, predicted
from stowage.stages.report.units import MIB

SHARES = 200
"""Pieces of an iteration; a table of memory has the highest bytes of each."""


def write_curves(
    folder: Path, plan_rows: Sequence[PlanRow], memory: Sequence[MemorySample], steps: Sequence[StepRecord]
) -> None:
    """Write `loss.csv` and `memory.csv`, each atomically; what was not measured is an empty cell.

    Args:
        folder: the folder to write to.
        plan_rows: the plan.
        memory: allocator samples of training.
        steps: records of training.
    """
    for name, frame in (("loss", loss_frame(steps)), ("memory", memory_frame(plan_rows, memory))):
        write_atomically(folder / f"{name}.csv", frame.write_csv().encode())


def loss_frame(steps: Sequence[StepRecord]) -> pl.DataFrame:
    """Return loss and time of each iteration, plain PyTorch's beside them."""
    frame = pl.DataFrame(
        [(s.iteration, s.loss, s.eager_loss, s.time_s, s.eager_time_s) for s in steps],
        schema={
            "iteration": pl.Int64,
            "loss": pl.Float64,
            "plain_loss": pl.Float64,
            "time_s": pl.Float64,
            "plain_time_s": pl.Float64,
        },
        orient="row",
    )
    return frame.with_columns(pl.col("loss", "plain_loss", "time_s", "plain_time_s").fill_nan(None))


def memory_frame(plan_rows: Sequence[PlanRow], memory: Sequence[MemorySample]) -> pl.DataFrame:
    """Return device memory in MiB against the share of the iteration; each line is a share of its own time."""
    lines = {
        "predicted": predicted(plan_rows),
        "measured": measured(memory, "measured"),
        "plain": measured(memory, "eager"),
    }
    shares = pl.DataFrame({"share": range(SHARES + 1)}, schema={"share": pl.Int64})
    for name, curve in lines.items():
        shares = shares.join(_highest(curve, name), on="share", how="left").with_columns(pl.col(name).forward_fill())
    return shares.with_columns(pl.col("share") * (100 / SHARES)).rename({"share": "share_percent"})


def _highest(curve: PlotLine, name: str) -> pl.DataFrame:
    """Return the highest bytes of each piece of the iteration."""
    start, end = (curve.times_s[0], curve.times_s[-1]) if curve.times_s else (0.0, 0.0)
    span = (end - start) or 1.0
    at = [min(SHARES, math.floor(SHARES * (t - start) / span)) for t in curve.times_s]
    frame = pl.DataFrame(
        {"share": at, name: [b / MIB for b in curve.nbytes]}, schema={"share": pl.Int64, name: pl.Float64}
    )
    return frame.group_by("share").agg(pl.col(name).max().round(3)).sort("share")
