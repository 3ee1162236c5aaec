"""Writes a curve as text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl

from stowage.flows.planning.curve import Curve
from stowage.stages.report.units import percent, seconds, size

_BAR = 24


def curve_text(curve: Curve) -> str:
    """Write the curve as a table with a bar for each slowdown; for a card, the answer comes first."""
    frame = curve.frame()
    slowest = frame.filter("feasible")["slowdown"].max() or 0.0
    columns = {"budget": size, "of plain": percent, "peak": size, "step": seconds, "slower": _signed}
    shown = frame.with_columns(
        pl.col("budget_bytes").alias("budget"),
        (pl.col("budget_bytes") / curve.plain_peak_bytes).alias("of plain"),
        pl.col("peak_bytes").alias("peak"),
        pl.col("step_time_s").alias("step"),
        pl.col("slowdown").alias("slower"),
        (pl.col("offload_bytes") + pl.col("reload_bytes")).alias("moved"),
        pl.col("wait_s").alias("waits"),
        (pl.col("slowdown").clip(lower_bound=0) / max(float(str(slowest)), 1e-12) * _BAR).round().alias("bar"),
    )
    if curve.moves:
        columns |= {"moved": size, "waits": seconds}
    heads = [*columns, "how", ""]
    rows = []
    for row in shown.iter_rows(named=True):
        if row["feasible"]:
            cells = [write(row[name]) for name, write in columns.items()]
            rows.append([*cells, row["method"], "▇" * int(row["bar"])])
        else:
            cells = [size(row["budget"]), percent(row["of plain"]), *[""] * (len(columns) - 2)]
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
        f"plain PyTorch {size(curve.plain_peak_bytes)}; everything kept {size(curve.keep_all_peak_bytes)}, "
        f"{seconds(curve.keep_all_time_s)} a step; least {size(curve.smallest_bytes)}",
        "",
        aligned(heads),
        *(aligned(row) for row in rows),
        *(["", "The estimate assumes:", *(f"- {line}" for line in answer.assumptions)] if answer is not None else []),
    ]
    return "\n".join(lines)


def _signed(fraction: float) -> str:
    return f"{100 * fraction:+.1f}%"
