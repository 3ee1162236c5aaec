"""Holds a curve of step time against budget, and writes it as text, table and picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import polars as pl

from stowage.stages.ir.curve import CurvePoint
from stowage.stages.ir.files import write_atomically
from stowage.stages.ir.table import write_rows
from stowage.stages.report.frames import frame_of
from stowage.stages.report.units import percent, seconds, size

_BAR = 24


Verdict = Literal["plainly", "planned", "with_ram", "no"]


@dataclass(frozen=True)
class CardAnswer:
    """Says whether a step fits a card that is only described; an estimate.

    Attributes:
        verdict: `plainly`: it fits without a plan; `planned`: with a plan in the card; `with_ram`: with a plan that
            also uses RAM; `no`: not at all.
        line: the same for people, in one line.
        budget_bytes: the bytes of the card that the step may take.
        batch_sizes: ranges of batch sizes, for people.
        assumptions: what the estimate rests on, a line each.
    """

    verdict: Verdict
    line: str
    budget_bytes: int
    batch_sizes: str
    assumptions: tuple[str, ...]


@dataclass(frozen=True)
class Curve:
    """Holds predicted step times against budgets.

    Attributes:
        model: what is trained, for people.
        device: name of the device that the costs are from.
        plain_peak_bytes: predicted peak of plain PyTorch, whose gradients wait for the updates.
        keep_all_bytes: the budget within which an iteration without recomputation fits, under a plan.
        keep_all_peak_bytes, keep_all_time_s: its peak, and its time.
        smallest_bytes: the least budget for which there is a plan. A budget of a GPU has more than the tensors of a
            plan: its allocator needs some too.
        estimated: costs are estimates from the device's rates, not measurements.
        points: by budget, the largest first.
        answer: whether the step fits, on a card that is only described.
    """

    model: str
    device: str
    plain_peak_bytes: int
    keep_all_bytes: int
    keep_all_peak_bytes: int
    keep_all_time_s: float
    smallest_bytes: int
    estimated: bool
    points: tuple[CurvePoint, ...]
    answer: CardAnswer | None = None

    @property
    def transfers(self) -> bool:
        """Say whether any of the plans uses the lower tier."""
        return any(p.traffic_bytes for p in self.points)

    def frame(self) -> pl.DataFrame:
        """Return the points as a table, the largest budget first."""
        return frame_of(CurvePoint, self.points)

    def least_at(self, slowdown: float) -> CurvePoint | None:
        """Return the point with the least memory whose slowdown, as a fraction, is at most this; None without one."""
        found = self.frame().filter(pl.col("feasible") & (pl.col("slowdown") <= slowdown)).sort("budget_bytes")
        if found.is_empty():
            return None
        return next(p for p in self.points if p.budget_bytes == found["budget_bytes"][0])

    def write(self, folder: str | Path) -> list[Path]:
        """Write `curve.parquet` and `curve.png` into a folder, each atomically.

        Returns:
            The two paths.

        Raises:
            UnwritableError: they cannot be written.
        """
        # matplotlib takes a second to import
        from stowage.stages.report.figures import render
        from stowage.stages.report.tradeoff import tradeoff_figure

        table, picture = Path(folder) / "curve.parquet", Path(folder) / "curve.png"
        write_rows(table, CurvePoint, self.points)
        budget = self.answer.budget_bytes if self.answer is not None else 0
        # Plain PyTorch leaves as much to the allocator as a plan does, and the axis is of budgets.
        plain = self.plain_peak_bytes + self.keep_all_bytes - self.keep_all_peak_bytes
        _, png = render(lambda: tradeoff_figure(self.points, plain, budget, "the card"))
        write_atomically(picture, png)
        return [table, picture]

    def __str__(self) -> str:
        return curve_text(self)


def curve_text(curve: Curve) -> str:
    """Write the curve as a table with a bar for each slowdown; for a card, the answer comes first."""
    frame = curve.frame()
    slowest = frame.filter("feasible")["slowdown"].max() or 0.0
    columns = {"budget": size, "peak": size, "of plain": percent, "step": seconds, "slower": _signed}
    shown = frame.with_columns(
        pl.col("budget_bytes").alias("budget"),
        pl.col("peak_bytes").alias("peak"),
        (pl.col("peak_bytes") / curve.plain_peak_bytes).alias("of plain"),
        pl.col("step_time_s").alias("step"),
        pl.col("slowdown").alias("slower"),
        (pl.col("offload_bytes") + pl.col("reload_bytes")).alias("moved"),
        pl.col("wait_s").alias("waits"),
        (pl.col("slowdown").clip(lower_bound=0) / max(float(str(slowest)), 1e-12) * _BAR).round().alias("bar"),
    )
    if curve.transfers:
        columns |= {"moved": size, "waits": seconds}
    heads = [*columns, "how", ""]
    rows = []
    for row in shown.iter_rows(named=True):
        if row["feasible"]:
            cells = [write(row[name]) for name, write in columns.items()]
            how = row["method"]
            if row["planned_within_bytes"] < row["budget_bytes"]:
                how += f" (as within {size(row['planned_within_bytes'])})"
            rows.append([*cells, how, "▇" * int(row["bar"])])
        else:
            cells = [size(row["budget"]), *[""] * (len(columns) - 1)]
            rows.append([*cells, f"none: {size(row['smallest_feasible_bytes'])} is the least", ""])
    widths = [max(len(line[k]) for line in [heads, *rows]) for k in range(len(heads))]

    def aligned(line: Sequence[str]) -> str:
        right = len(columns)
        cells = [c.rjust(w) if k < right else c.ljust(w) for k, (c, w) in enumerate(zip(line, widths, strict=True))]
        return "  ".join(cells).rstrip()

    costs = "estimated from the device's rates" if curve.estimated else "measured"
    answer = curve.answer
    lines = [
        *([answer.line, answer.batch_sizes, ""] if answer is not None else []),
        f"{curve.model} on {curve.device}, costs {costs}",
        *_summary(curve),
        "",
        aligned(heads),
        *(aligned(row) for row in rows),
        *(["", "The estimate assumes:", *(f"- {line}" for line in answer.assumptions)] if answer is not None else []),
    ]
    return "\n".join(lines)


def _summary(curve: Curve) -> list[str]:
    """Write the ends of the curve; budgets and peaks apart where a reserve makes them differ."""
    plain = f"plain PyTorch {size(curve.plain_peak_bytes)}"
    time_s = f"{seconds(curve.keep_all_time_s)} a step"
    reserve_bytes = curve.keep_all_bytes - curve.keep_all_peak_bytes
    if not reserve_bytes:
        return [f"{plain}; everything kept {size(curve.keep_all_bytes)}, {time_s}; least {size(curve.smallest_bytes)}"]
    return [
        f"{plain}; everything kept {size(curve.keep_all_peak_bytes)}, {time_s}",
        f"a budget leaves some memory to the device's allocator: everything is kept within "
        f"{size(curve.keep_all_bytes)} ({size(reserve_bytes)} of it left); least {size(curve.smallest_bytes)}",
    ]


def _signed(fraction: float) -> str:
    return f"{100 * fraction:+.1f}%"
