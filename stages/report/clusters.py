"""Overhead and planning time against the size of clusters (thesis, figure 3.14)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

SHARE_COLOURS = ("#cc3344", "#ee9933", "#44996b", "#4477aa", "#aa5599")
METHOD_STYLES = ("-", "--", ":")

Lines = Mapping[tuple[str, str], Sequence[tuple[int, float]]]
"""(method, share) -> (members of a cluster at most, value), ascending."""

Totals = Mapping[str, Sequence[tuple[int, float]]]
"""method -> (members of a cluster at most, seconds), ascending."""


def clusters_figure(overheads: Mapping[str, Lines], seconds: Mapping[str, Totals]) -> Figure:
    """A column for each model: overhead in percent on top, processor time below.

    Args:
        overheads: model -> lines, in percent; colours are shares of the activation budget, dashes are methods.
        seconds: model -> time of partition, clusters and one plan.
    """
    figure = Figure(figsize=(max(4.4 * len(seconds), 6.0), 5.6), layout="constrained")
    panels = figure.subplots(2, max(len(seconds), 1), sharex="col", squeeze=False, height_ratios=(3, 2))
    methods = list(dict.fromkeys(method for totals in seconds.values() for method in totals))
    shares = list(dict.fromkeys(share for lines in overheads.values() for _, share in lines))
    styles = dict(zip(methods, METHOD_STYLES * (1 + len(methods))))
    colours = dict(zip(shares, SHARE_COLOURS * (1 + len(shares))))
    labelled: dict[str, object] = {}
    for column, (model, totals) in enumerate(seconds.items()):
        above, below = panels[0][column], panels[1][column]
        for (method, share), points in overheads.get(model, {}).items():
            label = f"{method}, {share}"
            (labelled[label],) = above.plot(
                *zip(*points), styles[method], color=colours[share], lw=1.6, marker="o", ms=4, label=label
            )
        for method, points in totals.items():
            label = f"{method}, time"
            (labelled[label],) = below.plot(
                *zip(*points), styles[method], color="#222222", lw=1.6, marker="s", ms=3.5, label=label
            )
        sizes = sorted({size for points in totals.values() for size, _ in points})
        below.set_xticks(sizes, [str(size) for size in sizes])
        below.set_xlabel("members of a cluster at most, $M^l$")
        above.set_title(model, fontsize=10)
        for axes in (above, below):
            axes.set_ylim(bottom=0)
            axes.grid(color="#e6e8eb")
    panels[0][0].set_ylabel("predicted overhead (%)")
    panels[1][0].set_ylabel("processor time (s)")
    figure.legend(list(labelled.values()), list(labelled), loc="outside upper left", ncols=4, fontsize=8)
    return figure
