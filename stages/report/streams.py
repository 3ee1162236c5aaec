"""Shows one iteration as predicted and as measured, stream by stream: the picture, and the tables beneath it."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from stowage.stages.ir.actions import ACTIONS, shown_lanes
from stowage.stages.ir.run import TraceSpan
from stowage.stages.ir.spans import SERIES, steps_of
from stowage.stages.report.units import NOTHING, ratio, seconds, size, times

_PARTS = {"forward": "#4477aa", "backward": "#44996b", "shared": "#9aa3ad"}
"""Colours of steps of the cycle; those of what runs beside them are in the table of actions."""
_STEPS_SHOWN = 24
_NUMBER = ' class="n"'
_MANY_SPANS = 2000


def _kind(span: TraceSpan) -> str:
    if span.stream != "compute":
        return span.stream
    return {"F": "forward", "B": "backward"}.get(span.name[:1], "shared")


def _colours() -> dict[str, str]:
    return _PARTS | {action: kind.colour for action, kind in ACTIONS.items() if kind.colour}


def streams_figure(spans: Sequence[TraceSpan]) -> Figure:
    """Draw a panel for the prediction and one for the measurement, on one scale, with a line for each lane."""
    present = [series for series in SERIES if any(s.series == series for s in spans)] or ["predicted"]
    lanes = [t for t in shown_lanes() if t == "compute" or any(ACTIONS[s.stream].lane == t for s in spans)]
    figure = Figure(figsize=(10, 0.8 + len(present) * (0.45 + 0.42 * len(lanes))), layout="constrained")
    start = min((s.start_s for s in spans), default=0.0)
    end = max((s.end_s for s in spans), default=1.0) or 1.0
    factor, unit = (1.0, "s") if end - start >= 1 else (1e3, "ms")
    panels: Any = figure.subplots(len(present), 1, sharex=True, squeeze=False)
    for series, (axes,) in zip(present, panels):
        mine = [s for s in spans if s.series == series]
        for position, lane in enumerate(lanes):
            on_it = [s for s in mine if ACTIONS[s.stream].lane == lane]
            _draw(axes, [s for s in on_it if not ACTIONS[s.stream].ends], position, 0.8, factor)
            _draw(axes, [s for s in on_it if ACTIONS[s.stream].ends], position, 0.34, factor)
        axes.set(xlim=(start * factor, end * factor))
        axes.set_title(series, loc="left", fontsize=10)
        axes.set_ylim(len(lanes) - 0.5, -0.5)
        axes.set_yticks(range(len(lanes)), lanes)
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
    panels[-1][0].set_xlabel(f"time from the start of the iteration ({unit})")
    kinds = {_kind(s) for s in spans}
    handles = [Patch(color=colour, label=kind) for kind, colour in _colours().items() if kind in kinds]
    if handles:
        figure.legend(handles=handles, loc="outside upper left", ncols=7, fontsize=9)
    return figure


def _draw(axes: Any, spans: Sequence[TraceSpan], lane: int, height: float, factor: float) -> None:
    colours = _colours()
    for kind in dict.fromkeys(_kind(s) for s in spans):
        bars = [(s.start_s * factor, (s.end_s - s.start_s) * factor) for s in spans if _kind(s) == kind]
        edge = 0.3 if len(bars) < 120 and kind != "wait" else 0.0
        drawn = axes.broken_barh(
            bars, (lane - height / 2, height), facecolors=colours[kind], edgecolor="white", lw=edge
        )
        drawn.set_rasterized(len(spans) > _MANY_SPANS)


def streams_tables(spans: Sequence[TraceSpan]) -> str:
    """Write HTML: each stream's time and bytes, then the time of each step, predicted beside measured."""
    return _totals(spans) + _steps(spans)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    titles = "".join(f"<th{_NUMBER if i else ''}>{name}</th>" for i, name in enumerate(head))
    body = "".join(
        "<tr>" + "".join(f"<td{_NUMBER if i else ''}>{cell}</td>" for i, cell in enumerate(row)) + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table></div>'


def _totals(spans: Sequence[TraceSpan]) -> str:
    rows = []
    for stream, name in ((action, kind.total) for action, kind in ACTIONS.items() if kind.total):
        mine = [[s for s in spans if s.stream == stream and s.series == series] for series in SERIES]
        if not any(mine):
            continue
        predicted, measured = (sum(s.end_s - s.start_s for s in part) if part else None for part in mine)
        moved = sum(s.nbytes for s in mine[0] or mine[1])
        rows.append(
            (name, seconds(predicted), seconds(measured), times(ratio(measured, predicted)), size(moved or None))
        )
    return _table(("stream", "predicted", "measured", "measured ÷ predicted", "bytes"), rows)


def _steps(spans: Sequence[TraceSpan]) -> str:
    predicted, measured = (steps_of(spans, series) for series in SERIES)
    count = max(len(predicted), len(measured))
    rows = []
    for i in range(count):
        step = (predicted or measured)[i] if i < len(predicted or measured) else None
        a = predicted[i].end_s - predicted[i].start_s if i < len(predicted) else None
        b = measured[i].end_s - measured[i].start_s if i < len(measured) else None
        rows.append((escape(step.name) if step else NOTHING, seconds(a), seconds(b), times(ratio(b, a))))
    table = _table(("step", "predicted", "measured", "measured ÷ predicted"), rows)
    if count <= _STEPS_SHOWN:
        return table
    return f"<details><summary>Time of each of the {count} steps</summary>{table}</details>"
