"""Overhead against peak memory: what each way to save memory costs (thesis, figures 2.7, 2.8 and 3.13)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from stowage.stages.report.units import byte_unit

COLOURS = ("#9aa3ad", "#66ccee", "#aa5599", "#44996b", "#4477aa", "#ee9933", "#cc3344", "#555c64", "#222222")


@dataclass(frozen=True)
class Point:
    """Measured and predicted peak, and time over that of keeping everything, less 1; a peak of -1 where there is no
    prediction."""

    peak_bytes: int
    overhead: float
    predicted_peak_bytes: int = -1
    predicted_overhead: float = float("nan")


def remat_figure(title: str, lines: Mapping[str, Sequence[Point]]) -> Figure:
    """A line for each contestant as measured, and a dotted one as predicted.

    Args:
        title: of the picture.
        lines: name -> points, ascending in measured peak.
    """
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    unit, name = byte_unit([p.peak_bytes for points in lines.values() for p in points] or [1])
    for (contestant, points), colour in zip(lines.items(), _colours(len(lines))):
        measured = [(p.peak_bytes / unit, 100 * p.overhead) for p in points]
        axes.plot(*zip(*measured), color=colour, lw=1.6, marker="o", ms=4, label=contestant)
        predicted = [
            (p.predicted_peak_bytes / unit, 100 * p.predicted_overhead) for p in points if p.predicted_peak_bytes >= 0
        ]
        if predicted:
            label = f"{contestant}, predicted"
            axes.plot(*zip(*predicted), ":", color=colour, lw=1.2, marker="o", ms=4, mfc="none", label=label)
    axes.set(xlabel=f"device memory, measured peak ({name})", ylabel="overhead (%)")
    axes.set_title(title, fontsize=10)
    axes.grid(color="#e6e8eb")
    axes.legend(fontsize=8)
    return figure


def _colours(count: int) -> list[str]:
    return [COLOURS[i % len(COLOURS)] for i in range(count)]
