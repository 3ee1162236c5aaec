"""Draws step time against budget, and beneath it the bytes that each step transfers, if any."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from stowage.stages.ir.curve import CurvePoint
from stowage.stages.report.units import byte_unit, size

STEEP = 0.5
"""Slowdown, as a fraction, beyond which the axis of times is a logarithm."""

_PLAN, _MOVED, _LIMIT, _PLAIN, _GRID = "#4477aa", "#ee9933", "#cc3344", "#9aa3ad", "#e6e8eb"
_TICKS = (0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
"""Slowdowns in percent."""


def tradeoff_figure(
    points: Sequence[CurvePoint], plain_peak_bytes: int = 0, budget_bytes: int = 0, marked: str = "this plan"
) -> Figure:
    """Draw the predicted slowdown against the budget; the line ends where no plan fits.

    Args:
        points: points of the curve; budgets without a plan are left out.
        plain_peak_bytes: peak of plain PyTorch, 0 for none.
        budget_bytes: budget of a plan or memory of a card to mark, 0 for none.
        marked: how the legend names that budget.
    """
    known = sorted((p for p in points if p.feasible), key=lambda p: p.budget_bytes)
    offloads = any(p.traffic_bytes for p in known)
    unit, name = byte_unit([plain_peak_bytes, budget_bytes, *(p.budget_bytes for p in known)])
    x = [p.budget_bytes / unit for p in known]
    figure = Figure(figsize=(10, 5.4 if offloads else 3.9), layout="constrained")
    panels: Any = figure.subplots(2 if offloads else 1, 1, sharex=True, squeeze=False)[:, 0]
    axes = panels[0]
    axes.plot(x, [1 + p.slowdown for p in known], color=_PLAN, lw=2, marker="o", ms=4, label="predicted step")
    if known:
        axes.axvline(x[0], color=_LIMIT, ls=(0, (5, 3)), lw=1.4, label=f"least: {size(known[0].budget_bytes)}")
    for nbytes, label, colour in ((plain_peak_bytes, "plain PyTorch", _PLAIN), (budget_bytes, marked, "#222222")):
        if nbytes:
            axes.axvline(nbytes / unit, color=colour, lw=1.4, label=f"{label}: {size(nbytes)}", zorder=1)
    _axis_of_times(axes, [p.slowdown for p in known])
    if offloads:
        scale, moved = byte_unit([p.traffic_bytes for p in known])
        y = [p.traffic_bytes / scale for p in known]
        panels[1].plot(x, y, color=_MOVED, lw=2, marker="o", ms=4, label="moved in each step")
        panels[1].set(ylabel=f"moved ({moved})")
        panels[1].set_ylim(bottom=0)
    for panel in panels:
        panel.grid(color=_GRID)
    panels[-1].set(xlabel=f"device budget ({name})")
    found = [panel.get_legend_handles_labels() for panel in panels]
    handles, labels = [h for hs, _ in found for h in hs], [label for _, ls in found for label in ls]
    if handles:
        figure.legend(handles, labels, loc="outside upper left", ncols=4, fontsize=9)
    return figure


def _axis_of_times(axes: Any, slowdowns: Sequence[float]) -> None:
    """Set ticks in percent above the time of keeping everything."""
    low, high = min([0.0, *slowdowns]), max([0.01, *slowdowns])
    if high > STEEP:
        axes.set_yscale("log")
        axes.yaxis.set_minor_locator(NullLocator())
    margin = 0.04 * (high - low)
    axes.set_ylim(1 + low - margin, 1 + high + margin)
    ticks = [t for t in _TICKS if low <= t / 100 <= high + margin]
    kept = [t for k, t in enumerate(ticks) if t in (0, 10, 20, 50) or t >= 0.05 * 100 * high or k == 0]
    axes.yaxis.set_major_locator(FixedLocator([1 + t / 100 for t in kept]))
    axes.set_yticklabels([f"+{t}%" if t else "±0%" for t in kept])
    axes.set(ylabel="predicted slowdown")
