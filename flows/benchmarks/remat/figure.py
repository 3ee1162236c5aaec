"""Draws overhead against peak memory for each way to save memory (thesis, figures 2.7, 2.8 and 3.13)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, NullLocator, PercentFormatter, ScalarFormatter

from stowage.stages.report.units import byte_unit

METHOD_COLOURS = ("#cc3344", "#4477aa", "#ee9933", "#44996b", "#aa5599", "#66ccee", "#8a6d3b", "#222222")
PEER_MARKS = ("X", "D", "s", "^", "v", "P")
PEER_COLOURS = ("#222222", "#7d8790", "#555c64", "#9aa3ad", "#b0b7bf", "#7d8790")
COLUMNS = 3
"""Number of panels beside each other, at most."""

HIGH = 100.0
"""Overhead in percent; where a point is above it, the upper part of the axis is logarithmic."""

LINEAR = 20.0
"""Overhead in percent up to which a logarithmic axis is linear."""

TICKS = (0, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)


@dataclass(frozen=True)
class Point:
    """Measured and predicted peak and overhead, which is the time over that of keeping everything, less 1.

    The predicted peak is -1 where there is no prediction.
    """

    peak_bytes: int
    overhead: float
    predicted_peak_bytes: int = -1
    predicted_overhead: float = float("nan")


@dataclass(frozen=True)
class Panel:
    """One model's points.

    Attributes:
        methods: method of planning -> points, ascending in measured peak.
        peers: peer -> points, ascending in measured peak.
        fixed_bytes: bytes of a peak that are no activations, for a second axis; -1 for none.
        activation_bytes: bytes of activations when everything is kept, for a second axis; -1 for none.
    """

    methods: Mapping[str, Sequence[Point]]
    peers: Mapping[str, Sequence[Point]]
    fixed_bytes: int = -1
    activation_bytes: int = -1


def remat_figure(panels: Mapping[str, Panel]) -> Figure:
    """Draw a panel for each model: lines for methods of planning, grey marks for peers.

    Lines are as measured; dotted ones with hollow marks as predicted.

    Args:
        panels: title -> panel; a name has the same colour in all.
    """
    columns = min(len(panels), COLUMNS)
    rows = math.ceil(len(panels) / max(columns, 1))
    single = len(panels) == 1
    figure = Figure(figsize=(9.6, 4.8) if single else (4.2 * columns, 0.9 + 3.4 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    methods = dict.fromkeys(name for panel in panels.values() for name in panel.methods)
    peers = dict.fromkeys(name for panel in panels.values() for name in panel.peers)
    colours = dict(zip(methods, cycle(METHOD_COLOURS)))
    marks = dict(zip(peers, zip(cycle(PEER_MARKS), cycle(PEER_COLOURS))))
    for axes, (title, panel) in zip(grid.flat, panels.items()):
        _draw(axes, panel, colours, marks)
        axes.set_title(title, fontsize=10)
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_axis_off()
    for row in grid:
        row[0].set_ylabel("overhead (%)")
    figure.legend(
        handles=_handles(colours, marks, predicted=any(_is_predicted(p) for p in panels.values())),
        loc="outside right upper" if single else "outside upper left",
        ncols=1 if single else 4,
        fontsize=8,
    )
    return figure


def _draw(axes: Axes, panel: Panel, colours: Mapping[str, str], marks: Mapping[str, tuple[str, str]]) -> None:
    everything = [p for points in (*panel.methods.values(), *panel.peers.values()) for p in points]
    unit, name = byte_unit([p.peak_bytes for p in everything] or [1])
    for peer, points in panel.peers.items():
        mark, colour = marks[peer]
        x, y = _measured(points, unit)
        axes.plot(x, y, lw=0, marker=mark, ms=6, mew=0.5, mec="white", color=colour, label=peer, zorder=4)
    for number, (method, points) in enumerate(panel.methods.items()):  # all marks stay visible where lines meet
        style: dict[str, Any] = {"color": colours[method], "marker": "o", "ms": 4.5 + 1.6 * number}
        x, y = _predicted(points, unit)
        axes.plot(x, y, ":", lw=1.1, alpha=0.8, mfc="white", label=f"{method}, predicted", zorder=2, **style)
        x, y = _measured(points, unit)
        axes.plot(x, y, "-", lw=1.6, label=method, zorder=3 - 0.05 * number, **style)
    axes.set_xlabel(f"peak of device memory ({name})")
    axes.grid(color="#e6e8eb")
    _scale(axes, [100 * p.overhead for p in everything])
    if panel.activation_bytes > 0:
        _add_shares(axes, panel.fixed_bytes / unit, panel.activation_bytes / unit)


def _add_shares(axes: Axes, fixed: float, activations: float) -> None:
    """Add a second axis on top: the share of the activation budget."""

    def share(peak: Any) -> Any:
        return (peak - fixed) / activations

    def peak(share: Any) -> Any:
        return fixed + share * activations

    above = axes.secondary_xaxis("top", functions=(share, peak))
    above.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    above.tick_params(labelsize=8, pad=1)
    above.set_xlabel("share of the activation budget", fontsize=8)


def _scale(axes: Axes, overheads: Sequence[float]) -> None:
    highest = max(overheads, default=0.0)
    if highest <= HIGH:
        return
    axes.set_yscale("symlog", linthresh=LINEAR, linscale=1.0)
    axes.set_ylim(min(0.0, *overheads) - 4, 1.25 * highest)
    axes.yaxis.set_major_locator(FixedLocator([t for t in TICKS if t <= 1.25 * highest]))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(ScalarFormatter())


def _measured(points: Sequence[Point], unit: int) -> tuple[list[float], list[float]]:
    return [p.peak_bytes / unit for p in points], [100 * p.overhead for p in points]


def _predicted(points: Sequence[Point], unit: int) -> tuple[list[float], list[float]]:
    known = [p for p in points if p.predicted_peak_bytes >= 0]
    return [p.predicted_peak_bytes / unit for p in known], [100 * p.predicted_overhead for p in known]


def _is_predicted(panel: Panel) -> bool:
    return any(p.predicted_peak_bytes >= 0 for points in panel.methods.values() for p in points)


def _handles(colours: Mapping[str, str], marks: Mapping[str, tuple[str, str]], *, predicted: bool) -> list[Artist]:
    found: list[Artist] = [
        Line2D([], [], color=colour, lw=1.7, marker="o", ms=5, label=name) for name, colour in colours.items()
    ]
    if predicted:
        found.append(Line2D([], [], color="#555c64", lw=1.1, ls=":", marker="o", ms=5, mfc="white", label="predicted"))
    found += [
        Line2D([], [], lw=0, marker=mark, ms=6, mec="white", mew=0.5, color=colour, label=name)
        for name, (mark, colour) in marks.items()
    ]
    return found
