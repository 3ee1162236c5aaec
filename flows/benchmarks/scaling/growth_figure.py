"""Draws how long each stage of planning takes for deeper and deeper models."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

STAGE_COLOURS = {
    "trace": "#4477aa",
    "profile": "#66ccee",
    "partition": "#44996b",
    "options": "#aa5599",
    "solve": "#ee9933",
    "codegen": "#9aa3ad",
    "total": "#222222",
}

COLUMNS = 4
"""Number of panels beside each other, at most."""

Series = Mapping[str, Sequence[tuple[int, float]]]
"""Stage -> (layers, seconds), ascending in layers."""


def growth_figure(cases: Mapping[str, Series]) -> Figure:
    """Draw a log-log panel for each case, a line for each stage, and a dotted line that grows with the layers."""
    count = max(len(cases), 1)
    rows = math.ceil(count / COLUMNS)
    columns = math.ceil(count / rows)
    figure = Figure(figsize=(10, 0.6 + 3.0 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, sharey=True, squeeze=False)
    for axes, (title, series) in zip(grid.flat, cases.items()):
        for stage, points in series.items():
            width = 2.2 if stage == "total" else 1.4
            axes.plot(
                [n for n, _ in points],
                [s for _, s in points],
                color=STAGE_COLOURS.get(stage, "#555c64"),
                lw=width,
                marker="o",
                ms=3,
                label=stage,
            )
        if total := series.get("total"):
            (first, seconds), (last, _) = total[0], total[-1]
            axes.plot([first, last], [seconds, seconds * last / first], ":", color="#cc3344", lw=1.4, label="linear")
        layers = sorted({n for points in series.values() for n, _ in points})
        axes.set(xscale="log", yscale="log", xlabel="layers")
        axes.set_xticks(layers, [str(n) for n in layers])
        axes.xaxis.minorticks_off()
        axes.set_title(title, fontsize=10)
        axes.grid(color="#e6e8eb")
    for axes in list(grid.flat)[len(cases) :]:
        axes.set_axis_off()
    for row in grid:
        row[0].set_ylabel("processor time (s)")
    figure.legend(*grid[0][0].get_legend_handles_labels(), loc="outside upper left", ncols=8, fontsize=9)
    return figure
