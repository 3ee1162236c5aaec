"""The rows of the rematerialization benchmark, as they are stored, said, tabulated and drawn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from stowage.flows._remat_names import AUTO
from stowage.stages.ir.errors import MIB
from stowage.stages.report.figures import render
from stowage.stages.report.remat import Panel, Point, remat_figure
from stowage.stages.solve.request import METHODS

NAN = float("nan")


@dataclass(frozen=True)
class RematRow:
    """One point.

    Attributes:
        model: its name.
        contestant: a method of planning, or a peer.
        setting: the share of keep-all's activation budget that was asked for (`50%`), `smallest` for the method's
            smallest feasible budget, `in … MiB` for what another contestant takes, or a peer's value.
        budget_bytes, predicted_peak_bytes: of the device; -1 for peers.
        predicted_time_s: of an iteration; for plain PyTorch that of keeping everything, for other peers NaN.
        predicted_overhead: predicted time over the prediction for keeping everything, less 1; NaN for peers.
        found_by: the planner that found the plan, or the backend of a compiled peer.
        plan_s: time to plan, after the model was traced and profiled; stores are shared, so what the first point of a
            model solves, later ones find.
        peak_bytes: measured; -1 where there is no measurement.
        activation_share: of keep-all's activation budget, at that peak.
        eager_peak_bytes: of plain PyTorch, measured.
        time_s, eager_time_s: medians over rounds.
        overhead: median over rounds of the ratio to plain PyTorch's time in the same round, less 1.
        rounds: iterations timed.
        equal: loss and every gradient to plain PyTorch's, bit for bit, in every iteration.
        note: why there is no measurement.
    """

    model: str
    contestant: str
    setting: str
    budget_bytes: int = -1
    predicted_peak_bytes: int = -1
    predicted_time_s: float = NAN
    predicted_overhead: float = NAN
    found_by: str = ""
    plan_s: float = NAN
    peak_bytes: int = -1
    activation_share: float = NAN
    eager_peak_bytes: int = -1
    time_s: float = NAN
    eager_time_s: float = NAN
    overhead: float = NAN
    rounds: int = 0
    equal: bool = False
    note: str = ""


def describe(row: RematRow) -> str:
    """One line for people."""
    name = f"{row.model}, {row.contestant} {row.setting}".strip()
    if row.note:
        return f"{name}: {row.note}"
    predicted = f" (predicted {row.predicted_overhead:+.1%})" if row.predicted_peak_bytes >= 0 else ""
    times = "" if math.isnan(row.predicted_time_s) else f", {row.time_s / row.predicted_time_s:.2f} × predicted time"
    return (
        f"{name}: {row.peak_bytes / MIB:,.1f} MiB ({row.activation_share:.0%} of keep-all's activations), overhead "
        f"{row.overhead:+.1%}{predicted}{times}, {'equal' if row.equal else 'not equal'}"
    )


def markdown_of(rows: Sequence[RematRow]) -> str:
    """The rows as a Markdown table."""
    lines = [
        "| model | contestant | setting | budget | peak | activations | overhead | predicted | time ÷ predicted "
        "| auto within that peak | planned in | equal |",
        "|---|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    for r in rows:
        planned = r.predicted_peak_bytes >= 0
        budget = f"{r.budget_bytes / MIB:,.1f} MiB" if r.budget_bytes >= 0 else ""
        if r.note:
            lines.append(f"| {r.model} | {r.contestant} | {r.setting} | {budget} | {r.note} | | | | | | | |")
            continue
        cells = [
            r.model,
            r.contestant if r.found_by in ("", r.contestant) else f"{r.contestant} ({r.found_by})",
            r.setting,
            budget,
            f"{r.peak_bytes / MIB:,.1f} MiB",
            f"{r.activation_share:.0%}",
            f"**{r.overhead:+.1%}**" if planned else f"{r.overhead:+.1%}",
            f"{r.predicted_overhead:+.1%}" if planned else "",
            "" if math.isnan(r.predicted_time_s) else f"{r.time_s / r.predicted_time_s:.2f}",
            "" if r.contestant == AUTO or (ours := least_overhead(rows, r)) is None else f"{ours:+.1%}",
            f"{r.plan_s:.1f} s" if planned else "",
            "yes" if r.equal else "no",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def least_overhead(rows: Sequence[RematRow], of: RematRow) -> float | None:
    """The least overhead measured of plans by `AUTO` that took no more memory than a row; None where there are none."""
    ours = [r for r in rows if (r.model, r.contestant) == (of.model, AUTO) and not r.note]
    return min((r.overhead for r in ours if r.peak_bytes <= of.peak_bytes), default=None)


def picture(rows: Sequence[RematRow]) -> bytes:
    """Overhead against peak, a panel for each model, as PNG."""
    models = dict.fromkeys(r.model for r in rows)
    return render(lambda: remat_figure({m: panel_of([r for r in rows if r.model == m]) for m in models}))[1]


def panel_of(rows: Sequence[RematRow]) -> Panel:
    """The measured points of one model; methods and peers keep the order of the rows."""
    methods: dict[str, list[Point]] = {r.contestant: [] for r in rows if r.contestant in METHODS}
    peers: dict[str, list[Point]] = {r.contestant: [] for r in rows if r.contestant not in METHODS}
    measured = sorted((r for r in rows if not r.note), key=lambda r: r.peak_bytes)
    for r in measured:
        point = Point(r.peak_bytes, r.overhead, r.predicted_peak_bytes, r.predicted_overhead)
        (methods if r.contestant in METHODS else peers)[r.contestant].append(point)
    if not measured or measured[0].activation_share == measured[-1].activation_share:
        return Panel(methods, peers)
    least, most = measured[0], measured[-1]
    activations = (most.peak_bytes - least.peak_bytes) / (most.activation_share - least.activation_share)
    return Panel(methods, peers, round(least.peak_bytes - least.activation_share * activations), round(activations))
