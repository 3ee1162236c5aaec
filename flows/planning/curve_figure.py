"""A curve as a picture: step time above, and what moves below it where a tier is used."""

from __future__ import annotations

from pathlib import Path

import polars as pl
from matplotlib.figure import Figure

from stowage.flows.planning.curve import Curve
from stowage.stages.ir.files import write_atomically
from stowage.stages.report.figures import render
from stowage.stages.report.units import byte_unit, size

_PLAN, _MOVED, _LIMIT, _GRID = "#4477aa", "#ee9933", "#cc3344", "#e6e8eb"


def curve_figure(curve: Curve, budget_bytes: int = 0) -> Figure:
    """Predicted slowdown against budget; the curve ends where no plan fits.

    Args:
        curve: what was planned.
        budget_bytes: of a plan to mark, 0 for none.
    """
    frame = curve.frame().filter("feasible").sort("budget_bytes")
    unit, name = byte_unit([curve.plain_peak_bytes, *frame["budget_bytes"]])
    x = (frame["budget_bytes"] / unit).to_list()
    figure = Figure(figsize=(10, 5.4 if curve.moves else 4.0), layout="constrained")
    panels = figure.subplots(2 if curve.moves else 1, 1, sharex=True, squeeze=False)[:, 0]
    axes = panels[0]
    axes.plot(x, (100 * frame["slowdown"]).to_list(), color=_PLAN, lw=2, marker="o", ms=4, label="predicted step")
    axes.axvline(
        curve.smallest_bytes / unit, color=_LIMIT, ls=(0, (5, 3)), label=f"least: {size(curve.smallest_bytes)}"
    )
    axes.axvline(
        curve.plain_peak_bytes / unit, color="#9aa3ad", lw=1.2, label=f"plain PyTorch: {size(curve.plain_peak_bytes)}"
    )
    if budget_bytes:
        axes.axvline(budget_bytes / unit, color="#222222", lw=1.2, label=f"this plan: {size(budget_bytes)}")
    axes.set(ylabel="slower than with everything kept (%)")
    axes.set_ylim(bottom=min(0.0, *(100 * frame["slowdown"]).to_list()))
    if curve.moves:
        traffic = frame.select(pl.col("offload_bytes") + pl.col("reload_bytes")).to_series()
        scale, moved = byte_unit(traffic)
        panels[1].plot(x, (traffic / scale).to_list(), color=_MOVED, lw=2, marker="o", ms=4, label="moved in each step")
        panels[1].set(ylabel=f"moved ({moved})")
        panels[1].set_ylim(bottom=0)
    for panel in panels:
        panel.grid(color=_GRID)
    panels[-1].set(xlabel=f"device budget ({name})")
    handles = [panel.get_legend_handles_labels() for panel in panels]
    figure.legend(
        [h for found, _ in handles for h in found],
        [label for _, found in handles for label in found],
        loc="outside upper left",
        ncols=4,
        fontsize=9,
    )
    return figure


def write_curve_figure(curve: Curve, path: Path) -> None:
    """Write the picture as PNG, atomically.

    Raises:
        UnwritableError: it cannot be written.
    """
    _, png = render(lambda: curve_figure(curve))
    write_atomically(path, png)
