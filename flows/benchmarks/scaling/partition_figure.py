"""Draws how long H-Partition takes for larger and larger graphs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

THESIS = (100_000, 7200.0)
"""Nodes and seconds that the thesis reports for its algorithm (3.3.6), on another machine."""

COLOURS = ("#4477aa", "#ee9933", "#44996b", "#aa5599", "#66ccee", "#555c64")


def partition_figure(shapes: Mapping[str, Sequence[tuple[int, float]]]) -> Figure:
    """Draw a log-log line for each shape of graph, a dotted one that grows with the nodes, and the thesis's number.

    Args:
        shapes: name -> (nodes, seconds), ascending in nodes.
    """
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for (name, points), colour in zip(shapes.items(), COLOURS):
        axes.plot([n for n, _ in points], [s for _, s in points], color=colour, lw=1.6, marker="o", ms=3.5, label=name)
    least = min(n for points in shapes.values() for n, _ in points)
    most = max(n for points in shapes.values() for n, _ in points)
    start = max(s for points in shapes.values() for n, s in points if n <= 2 * least)
    axes.plot([least, most], [start, start * most / least], ":", color="#cc3344", lw=1.4, label="linear")
    axes.plot(*THESIS, marker="x", ms=8, mew=2, ls="", color="#222222", label="thesis, 2 hours")
    axes.set(xscale="log", yscale="log", xlabel="nodes of the forward graph", ylabel="seconds, one core")
    axes.grid(color="#e6e8eb")
    axes.legend(fontsize=9)
    return figure
