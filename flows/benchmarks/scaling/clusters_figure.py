"""Draws overhead and planning time against the size of clusters (thesis, figure 3.14)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

SHARE_COLOURS = ("#cc3344", "#ee9933", "#44996b", "#4477aa", "#aa5599")
METHOD_STYLES = ("-", "--", ":")

Lines = Mapping[tuple[str, str], Sequence[tuple[int, float]]]
"""(method, share) -> (members of a cluster at most, value), ascending."""

Totals = Mapping[str, Sequence[tuple[int, float]]]
"""method -> (members of a cluster at most, seconds), ascending."""


def clusters_figure(overheads: Mapping[str, Lines], seconds: Mapping[str, Totals]) -> Figure:
    """Draw a column for each model: overhead in percent on top, processor time under it.

    Args:
        overheads: model -> lines, in percent; colours are shares of the activation budget, dashes are methods.
        seconds: model -> time of partition, clusters and one plan.
    """
    figure = Figure(figsize=(max(4.4 * len(seconds), 6.0), 5.6), layout="constrained")
    panels = figure.subplots(2, max(len(seconds), 1), sharex="col", squeeze=False, height_ratios=(3, 2))
    shares = list(dict.fromkeys(share for lines in overheads.values() for _, share in lines))
    named = [method for lines in overheads.values() for method, _ in lines]
    styles = dict(
        zip(dict.fromkeys([*named, *(m for totals in seconds.values() for m in totals)]), cycle(METHOD_STYLES))
    )
    colours = dict(zip(shares, cycle(SHARE_COLOURS)))
    labelled: dict[str, Artist] = {}
    for column, (model, totals) in enumerate(seconds.items()):
        above, beneath = panels[0][column], panels[1][column]
        lines = overheads.get(model, {})
        for (method, share), points in sorted(lines.items(), key=lambda line: shares.index(line[0][1])):
            label = f"{method}, {share}"
            labelled[label] = _draw(above, points, styles[method], colours[share], label)
        for method, points in totals.items():
            label = f"{method}, time"
            labelled[label] = _draw(beneath, points, styles[method], "#222222", label)
        sizes = sorted({size for points in totals.values() for size, _ in points})
        beneath.set_xticks(sizes, [str(size) for size in sizes])
        beneath.set_xlabel("members of a cluster at most, $M^l$")
        above.set_title(model, fontsize=10)
        for axes, drawn in ((above, lines.values()), (beneath, totals.values())):
            highest = max((value for points in drawn for _, value in points), default=1.0)
            axes.set_ylim(0, 1.1 * max(highest, 1.0))
            axes.grid(color="#e6e8eb")
    panels[0][0].set_ylabel("predicted overhead (%)")
    panels[1][0].set_ylabel("processor time (s)")
    handles = sorted(labelled, key=lambda label: label.endswith(", time"))
    figure.legend(
        handles=[labelled[label] for label in handles],
        loc="outside upper left",
        ncols=max(len(shares) + 1, 2),
        fontsize=8,
        handlelength=3.2,
    )
    return figure


def _draw(axes: Axes, points: Sequence[tuple[int, float]], style: str, colour: str, label: str) -> Artist:
    x, y = [size for size, _ in points], [value for _, value in points]
    return axes.plot(x, y, style, color=colour, lw=1.6, marker="o", ms=4, label=label)[0]
