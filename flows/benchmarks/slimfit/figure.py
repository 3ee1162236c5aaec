"""Draws accuracy against the share of units that are frozen, a panel for each task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from stowage.flows.benchmarks.slimfit.trials import BASELINE

COLOURS = {
    "ils": "#cc3344",
    "ils_paper": "#eb9aa3",
    "random": "#4477aa",
    "progressive": "#44996b",
    "round_robin": "#aa5599",
    "prefix": "#ee9933",
}


def accuracy_figure(summary: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw a line for each policy with its deviation over seeds, and what training everything reaches."""
    tasks = list(dict.fromkeys(row["task"] for row in summary))
    figure = Figure(figsize=(3.4 * max(1, len(tasks)), 3.6), layout="constrained")
    panels = figure.subplots(1, max(1, len(tasks)), squeeze=False)[0]
    for axes, task in zip(panels, tasks, strict=False):
        mine = [row for row in summary if row["task"] == task]
        for row in mine:
            if row["policy"] == BASELINE:
                axes.axhline(row["mean"], color="#222222", ls=":", lw=1.4, label=BASELINE)
        for policy in dict.fromkeys(row["policy"] for row in mine if row["policy"] != BASELINE):
            points = sorted((row for row in mine if row["policy"] == policy), key=lambda row: row["rate"])
            axes.errorbar(
                [row["rate"] for row in points],
                [row["mean"] for row in points],
                yerr=[row["deviation"] or 0.0 for row in points],
                color=COLOURS.get(policy, "#9aa3ad"),
                lw=1.6,
                marker="o",
                ms=3,
                capsize=2,
                label=policy.replace("_", "-"),
            )
        axes.set(xlabel="share of units frozen", title=task)
        axes.grid(color="#e6e8eb")
    panels[0].set_ylabel("right answers (%)")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=6, fontsize=8)
    return figure
