"""Draws how long planning takes for more GPUs and for more layers."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from stowage.flows.benchmarks.elixir.plan_time import PlanTime


def plan_time_figure(found: Sequence[PlanTime]) -> Figure:
    """Draw two panels: seconds of planning by GPUs, and by layers."""
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, case in zip(panels, ("GPUs", "layers"), strict=True):
        mine = [p for p in found if p.case == case]
        xs = [p.ranks if case == "GPUs" else p.layers for p in mine]
        axes.plot(xs, [p.seconds for p in mine], color="#4477aa", lw=2, marker="o", ms=4)
        axes.set_xlabel(case)
        if mine:
            axes.set(xscale="log", yscale="log")
        axes.set_xticks(xs, [str(x) for x in xs])
        axes.xaxis.minorticks_off()
        axes.grid(color="#e6e8eb")
        what = mine[0] if mine else None
        if what is not None:
            fixed = f"{what.layers} layers" if case == "GPUs" else f"{what.ranks} GPUs"
            axes.set_title(f"{what.model}, {fixed}", fontsize=10)
    panels[0].set_ylabel("planned in (s)")
    return figure
