"""Draws the four plots, as matplotlib figures that no global state touches; the same input gives the same bytes."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from stowage.stages.ir.actions import ACTIONS
from stowage.stages.ir.graph import SHARED
from stowage.stages.ir.run import StepRecord
from stowage.stages.report.activations import FATES, BlockFates, Fate
from stowage.stages.report.curves import KINDS, Kind, PlotLine, PlotSpan, turns
from stowage.stages.report.units import byte_unit, size

KIND_COLOURS: dict[Kind, str] = {
    "forward": "#4477aa",
    "recompute": "#ee9933",
    "backward": "#44996b",
    "update": ACTIONS["update"].colour,
}
FATE_COLOURS: dict[Fate, str] = {"kept": "#4477aa", "recomputed": "#ee9933", "dropped": "#cfd4da"}
_PLAN, _MEASURED, _EAGER, _BUDGET, _GRID = "#4477aa", "#222222", "#9aa3ad", "#cc3344", "#e6e8eb"
_MANY_SPANS = 2000
_STYLE: Any = {
    "svg.hashsalt": "stowage",
    "svg.fonttype": "none",
    "font.family": ["DejaVu Sans"],
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#8a9199",
    "axes.labelcolor": "#333940",
    "xtick.color": "#555c64",
    "ytick.color": "#555c64",
    "axes.axisbelow": True,
    "legend.frameon": False,
    "path.simplify": True,
}


@contextmanager
def _style() -> Iterator[None]:
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        yield


def render(draw: Callable[[], Figure]) -> tuple[str, bytes]:
    """Render a figure as SVG text for inlining (no XML header) and as PNG bytes at 150 dots per inch."""
    with _style():
        figure = draw()
        svg, png = io.StringIO(), io.BytesIO()
        figure.savefig(svg, format="svg", metadata={"Date": None, "Creator": None})
        figure.savefig(png, format="png", dpi=150, metadata={"Software": None})
    text = svg.getvalue()
    return text[text.index("<svg") :], png.getvalue()


def memory_figure(plan: PlotLine, measured: PlotLine, eager: PlotLine, budget_bytes: int) -> Figure:
    """Draw device bytes over one iteration.

    Each line has its own clock: measuring slows an iteration, so x is a share of the iteration's own time.
    """
    figure = Figure(figsize=(10, 3.9), layout="constrained")
    axes = figure.add_subplot()
    lines = [line for line in _memory_lines(plan, measured, eager) if line[0].times_s]
    unit, name = byte_unit([budget_bytes, *(max(c.nbytes) for c, *_ in lines)])
    for curve, label, colour, width, order in lines:
        start, end = curve.times_s[0], curve.times_s[-1]
        shares = [100 * (t - start) / ((end - start) or 1.0) for t in curve.times_s]
        values = [b / unit for b in curve.nbytes]
        axes.plot(
            shares, values, color=colour, lw=width, label=f"{label}: peak {size(max(curve.nbytes))}", zorder=order
        )
        if curve is plan:
            axes.fill_between(shares, values, color=colour, alpha=0.12, lw=0, zorder=1)
    axes.axhline(
        budget_bytes / unit, color=_BUDGET, ls=(0, (5, 3)), lw=1.4, label=f"budget: {size(budget_bytes)}", zorder=5
    )
    axes.set(xlim=(0, 100), xlabel="share of the iteration (%)", ylabel=f"device memory ({name})")
    axes.set_ylim(0, 1.06 * max([budget_bytes, *(max(c.nbytes) for c, *_ in lines)]) / unit)
    axes.grid(axis="y", color=_GRID)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper left", ncols=4, fontsize=9, columnspacing=1.6)
    return figure


def _memory_lines(plan: PlotLine, measured: PlotLine, eager: PlotLine) -> list[tuple[PlotLine, str, str, float, int]]:
    return [
        (plan, "predicted", _PLAN, 2.4, 3),
        (measured, "measured", _MEASURED, 0.9, 4),
        (eager, "plain PyTorch, measured", _EAGER, 1.2, 2),
    ]


def timeline_figure(spans: Sequence[PlotSpan]) -> Figure:
    """Draw one lane for each stream; bars are coloured by kind of work, with the block's number where it fits."""
    streams = list(dict.fromkeys(s.stream for s in spans)) or ["compute"]
    figure = Figure(figsize=(10, 1.5 + 0.75 * len(streams)), layout="constrained")
    axes = figure.add_subplot()
    end = max((s.end_s for s in spans), default=1.0) or 1.0
    factor, unit = (1.0, "s") if end >= 1 else (1e3, "ms")
    edge = 0.4 if len(spans) < 120 else 0.0
    for lane, stream in enumerate(streams):
        for kind in KINDS:
            mine = [s for s in spans if s.stream == stream and s.kind == kind]
            bars = [(s.start_s * factor, (s.end_s - s.start_s) * factor) for s in mine]
            drawn = axes.broken_barh(bars, (lane - 0.4, 0.8), facecolors=KIND_COLOURS[kind], edgecolor="white", lw=edge)
            drawn.set_rasterized(len(spans) > _MANY_SPANS)
        _number_blocks(axes, [s for s in spans if s.stream == stream and s.block != SHARED], lane, end, factor)
    axes.set(xlim=(0, end * factor), xlabel=f"predicted time from the start of the iteration ({unit})")
    axes.set_ylim(len(streams) - 0.5, -0.6)
    axes.set_yticks(range(len(streams)), streams)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    present = {s.kind for s in spans}
    handles = [Patch(color=KIND_COLOURS[k], label=f"{k} {_share(spans, k)}") for k in KINDS if k in present]
    if handles:
        figure.legend(handles=handles, loc="outside upper left", ncols=4, fontsize=9)
    return figure


def _number_blocks(axes: Any, spans: Sequence[PlotSpan], lane: int, end: float, factor: float) -> None:
    """Write the blocks' numbers on the bars; where most are too thin for it, some of them above the lane."""

    def fits(block: int, width_s: float) -> bool:
        return width_s / end > 0.0085 * len(str(block))

    groups = [(g[0].block, g[0].start_s, g[-1].end_s, g) for g in turns(spans)]
    if sum(fits(block, b - a) for block, a, b, _ in groups) >= 0.8 * len(groups):
        style = {"ha": "center", "va": "center", "fontsize": 8, "color": "white", "fontweight": "bold"}
        for block, a, b, group in groups:
            wide = [s for s in group if fits(block, s.end_s - s.start_s)]
            places = [(s.start_s + s.end_s) / 2 for s in wide] or ([(a + b) / 2] if fits(block, b - a) else [])
            for x in places:
                axes.text(x * factor, lane, str(block), **style)
        return
    last = -end
    for block, a, b, _ in groups:
        axes.vlines(b * factor, lane - 0.4, lane + 0.4, color="white", lw=0.3)
        middle = (a + b) / 2
        if middle - last > 0.022 * end:
            axes.text(middle * factor, lane - 0.43, str(block), ha="center", va="bottom", fontsize=7, color="#555c64")
            last = middle


def _share(spans: Sequence[PlotSpan], kind: Kind) -> str:
    total = sum(s.end_s - s.start_s for s in spans)
    mine = sum(s.end_s - s.start_s for s in spans if s.kind == kind)
    return f"{100 * mine / total:.0f}%" if total else ""


def blocks_figure(fates: Sequence[BlockFates]) -> Figure:
    """Draw bytes of forward results by block: kept, recomputed, dropped."""
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    axes = figure.add_subplot()
    heights = [sum(b.nbytes(f) for f in FATES) for b in fates]
    unit, name = byte_unit(heights)
    bottom = [0.0] * len(fates)
    for fate in FATES:
        values = [b.nbytes(fate) / unit for b in fates]
        label = f"{fate}: {size(sum(b.nbytes(fate) for b in fates))}"
        axes.bar(range(len(fates)), values, 0.82, bottom=bottom, color=FATE_COLOURS[fate], label=label)
        bottom = [a + b for a, b in zip(bottom, values)]
    every = max(1, math.ceil(len(fates) / 36))
    first = every if every > 1 and any(b.block == SHARED for b in fates) else 0
    ticks = {i: str(b.block) for i, b in enumerate(fates) if b.block % every == 0 and b.block >= first}
    ticks |= {i: "shared" for i, b in enumerate(fates) if b.block == SHARED}
    axes.set_xticks(list(ticks), list(ticks.values()), fontsize=9)
    axes.set(xlim=(-0.6, max(len(fates), 1) - 0.4), xlabel="block of the chain", ylabel=f"forward results ({name})")
    axes.grid(axis="y", color=_GRID)
    if fates:
        figure.legend(*axes.get_legend_handles_labels(), loc="outside upper left", ncols=3, fontsize=9)
    return figure


def loss_figure(steps: Sequence[StepRecord]) -> Figure:
    """Draw the loss of every iteration, plain PyTorch's beneath it."""
    figure = Figure(figsize=(10, 3.3), layout="constrained")
    axes = figure.add_subplot()
    compared = [s for s in steps if not math.isnan(s.eager_loss)]
    few = "o" if len(steps) <= 60 else None
    if compared:
        x, y = [s.iteration for s in compared], [s.eager_loss for s in compared]
        axes.plot(x, y, color=_EAGER, lw=5, alpha=0.65, solid_capstyle="round", label="plain PyTorch", marker=few, ms=7)
    if steps:
        x, y = [s.iteration for s in steps], [s.loss for s in steps]
        axes.plot(x, y, color=_PLAN, lw=1.5, label="this plan", marker=few, ms=3.5)
        figure.legend(*axes.get_legend_handles_labels(), loc="outside upper left", ncols=2, fontsize=9)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="iteration", ylabel="loss")
    axes.grid(color=_GRID)
    return figure
