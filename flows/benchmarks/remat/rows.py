"""Defines the rows of the rematerialization benchmark, and writes them as sentences, tables and pictures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import polars as pl

from stowage.flows.benchmarks.markdown import markdown
from stowage.flows.benchmarks.remat.figure import Panel, Point, remat_figure
from stowage.flows.benchmarks.remat.names import AUTO, EAGER
from stowage.stages.ir.errors import MIB
from stowage.stages.ir.methods import NAMES
from stowage.stages.report.figures import render
from stowage.stages.report.frames import frame_of

NAN = float("nan")

SURELY = 0.05
"""Probability of chance under which a plan counts as slower."""

CLOSE_TIME = 0.1
"""Share of the predicted time by which a time that counts as close may differ."""

SPREAD = (
    pl.len().alias("plans"),
    (pl.col("error").abs() <= CLOSE_TIME).sum().alias("close"),
    pl.col("error").min().alias("least"),
    pl.col("error").max().alias("most"),
)
"""Expressions that say how close the predictions of `measured_plans` came."""

_MEASUREMENT = ("model", "peak_bytes", "time_s", "overhead")
"""Plans that are equal in these fields share a measurement."""


@dataclass(frozen=True)
class RematRow:
    """One point: a model under a plan within a budget, or under a peer.

    Attributes:
        model: its name.
        contestant: a method of planning, or a peer.
        setting: the share of keep-all's activation budget that was asked for (`50%`), `smallest` for the method's
            smallest feasible budget, `in … MiB` for what another contestant takes, or a peer's value.
        budget_bytes: device budget; -1 for peers.
        predicted_peak_bytes: predicted peak of the device; -1 for peers.
        predicted_time_s: predicted time of an iteration; for plain PyTorch that of keeping everything, for peers NaN.
        predicted_overhead: predicted time over the prediction for keeping everything, less 1; NaN for peers.
        plain_time_s: time of an iteration of plain PyTorch while the calls were profiled, timed as they are.
        found_by: the planner that found the plan, or the backend of a compiled peer.
        plan_s: time to plan, after the model was traced and profiled; stores are shared, so what the first point of a
            model solves, later ones find.
        peak_bytes: measured peak; -1 where there is no measurement.
        activation_share: share of keep-all's activation budget, at that peak.
        eager_peak_bytes: measured peak of plain PyTorch.
        time_s: median time over rounds.
        eager_time_s: median time of plain PyTorch over rounds.
        overhead: median over rounds of the ratio to plain PyTorch's time in the same round, less 1.
        rounds: iterations timed.
        equal: loss and every gradient are plain PyTorch's, bit for bit, in every iteration.
        note: why there is no measurement.
        ours_over_it: where a plan of `AUTO` within that peak seemed slower: its time over this point's, both in turns
            with each other, median, less 1; NaN elsewhere.
        by_chance: how likely chance alone makes the plan slower in as many of those rounds.
        processes: number of processes that measured it; of several the one with the median overhead counts.
    """

    model: str
    contestant: str
    setting: str
    budget_bytes: int = -1
    predicted_peak_bytes: int = -1
    predicted_time_s: float = NAN
    predicted_overhead: float = NAN
    plain_time_s: float = NAN
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
    ours_over_it: float = NAN
    by_chance: float = NAN
    processes: int = 1

    @property
    def over_prediction(self) -> float:
        """Return measured over predicted time, both relative to plain PyTorch's; NaN where nothing was predicted.

        Plain PyTorch's are those of the same turns, and of profiling: in between the machine's own speed drifts.
        """
        return (1 + self.overhead) / (self.predicted_time_s / self.plain_time_s)


def describe(row: RematRow) -> str:
    """Describe a row in one line for people."""
    name = f"{row.model}, {row.contestant} {row.setting}".strip()
    if row.note:
        return f"{name}: {row.note}"
    predicted = f" (predicted {row.predicted_overhead:+.1%})" if row.predicted_peak_bytes >= 0 else ""
    times = "" if math.isnan(row.over_prediction) else f", {row.over_prediction:.2f} × predicted time"
    return (
        f"{name}: {row.peak_bytes / MIB:,.1f} MiB ({row.activation_share:.0%} of keep-all's activations), overhead "
        f"{row.overhead:+.1%}{predicted}{times}, {'equal' if row.equal else 'not equal'}"
    )


def describe_comparison(ours: RematRow, row: RematRow) -> str:
    """Describe a second measurement in one line for people."""
    names = f"{row.model}, {ours.contestant} {ours.setting} in turns with {row.contestant} {row.setting}".rstrip()
    return f"{names}: {row.ours_over_it:+.1%} (by chance {row.by_chance:.0%})"


def markdown_of(rows: Sequence[RematRow]) -> str:
    """Return the rows as a Markdown table, with sentences about predictions and other contestants."""
    beside = pl.Series("auto within that peak", [_beside(rows, r) for r in rows], dtype=pl.String)
    ratio = pl.Series("time ÷ predicted", [r.over_prediction for r in rows], dtype=pl.Float64)
    frame = frame_of(RematRow, rows).with_columns(beside, ratio)
    measured, planned = pl.col("note") == "", pl.col("predicted_peak_bytes") >= 0

    def of(expression: pl.Expr | str, when: pl.Expr = measured) -> pl.Expr:
        return pl.when(when).then(expression)

    own = (pl.col("found_by") == "") | (pl.col("found_by") == pl.col("contestant"))
    table = frame.select(
        "model",
        pl.when(own | ~measured)
        .then("contestant")
        .otherwise(pl.format("{} ({})", "contestant", "found_by"))
        .alias("contestant"),
        "setting",
        of("budget_bytes", pl.col("budget_bytes") >= 0).alias("budget"),
        pl.struct("peak_bytes", "note").alias("peak"),
        of("activation_share").alias("activations"),
        of(pl.struct("overhead", planned.alias("planned"))).alias("overhead"),
        of("predicted_overhead", measured & planned).alias("predicted"),
        of(pl.col("time ÷ predicted")).alias("time ÷ predicted"),
        of(pl.col("auto within that peak")).alias("auto within that peak"),
        of("plan_s", measured & planned).alias("planned in"),
        of("equal").alias("equal"),
    )
    text = markdown(
        table,
        formats={
            "budget": lambda x: f"{x / MIB:,.1f} MiB",
            "peak": lambda x: x["note"] or f"{x['peak_bytes'] / MIB:,.1f} MiB",
            "activations": lambda x: f"{x:.0%}",
            "overhead": lambda x: f"**{x['overhead']:+.1%}**" if x["planned"] else f"{x['overhead']:+.1%}",
            "predicted": lambda x: f"{x:+.1%}",
            "time ÷ predicted": lambda x: f"{x:.2f}",
            "planned in": lambda x: f"{x:.1f} s",
        },
        right=("auto within that peak",),
    )
    return "\n".join([text, *(f"\n{sentence}" for sentence in (accuracy(rows), comparison(rows)) if sentence)])


def accuracy(rows: Sequence[RematRow]) -> str:
    """Say in one sentence how close predictions came; nothing where no plan was measured."""
    plans = measured_plans(rows)
    if plans.is_empty():
        return ""
    predicted = pl.col("predicted_peak_bytes")
    said = plans.select(
        *SPREAD,
        pl.col("error").median().alias("median"),
        (pl.col("processes") > 1).sum().alias("again"),
        ((pl.col("peak_bytes") - predicted).abs() <= pl.max_horizontal(predicted / 50, MIB)).sum().alias("peaks"),
    ).row(0, named=True)
    more = f", {said['again']} of them by the median of several processes" if said["again"] else ""
    above = sum(r.peak_bytes > r.budget_bytes for r in _plans(rows))
    return (
        f"{said['close']} of {said['plans']} plans took, relative to plain PyTorch then and there, within "
        f"{CLOSE_TIME:.0%} of the predicted time (from {said['least']:+.1%} to {said['most']:+.1%}, median "
        f"{said['median']:+.1%}){more}; the peaks of {said['peaks']} were within 2% or 1 MiB of the prediction, "
        f"{above} above the budget."
    )


def accuracy_by_model(rows: Sequence[RematRow]) -> pl.DataFrame:
    """Return how close the predictions of each model's plans came: the columns of `SPREAD`, a line for each model."""
    return measured_plans(rows).group_by("model", maintain_order=True).agg(*SPREAD)


def unlike_predicted(rows: Sequence[RematRow]) -> list[list[RematRow]]:
    """Return plans whose time was not close to the predicted one (`CLOSE_TIME`), grouped by measurement."""
    return [same for same in _measured_together(_plans(rows)) if abs(same[0].over_prediction - 1) > CLOSE_TIME]


def measured_plans(rows: Sequence[RematRow]) -> pl.DataFrame:
    """Return the plans that were measured, with the `error` of their predicted times as a fraction.

    Of plans that share a measurement there is the first one.
    """
    expected = pl.col("predicted_time_s") / pl.col("plain_time_s")
    frame = frame_of(RematRow, _plans(rows)).unique(_MEASUREMENT, keep="first", maintain_order=True)
    return frame.with_columns(((1 + pl.col("overhead")) / expected - 1).alias("error"))


def _plans(rows: Sequence[RematRow]) -> list[RematRow]:
    return [r for r in rows if r.predicted_peak_bytes >= 0 and not r.note]


def _measured_together(plans: Sequence[RematRow]) -> list[list[RematRow]]:
    found: dict[tuple[object, ...], list[RematRow]] = {}
    for r in plans:
        found.setdefault(tuple(getattr(r, name) for name in _MEASUREMENT), []).append(r)
    return list(found.values())


def _beside(rows: Sequence[RematRow], row: RematRow) -> str:
    """Make a cell: the overhead of `AUTO` within a row's peak, and its ratio to the row in turns."""
    ours = None if row.contestant == AUTO else fastest_within(rows, row)
    if ours is None:
        return ""
    return f"{ours.overhead:+.1%}" + ("" if math.isnan(row.ours_over_it) else f" (in turns {row.ours_over_it:+.1%})")


def comparison(rows: Sequence[RematRow]) -> str:
    """Say in one sentence how `AUTO`'s plans compare with others within the same peak; nothing where there are none."""
    others = [r for r in rows if r.contestant not in (AUTO, EAGER) and not r.note]
    compared = [r for r in others if fastest_within(rows, r) is not None]
    if not compared:
        return ""
    seeming = [theirs for _, theirs in seemed_slower(rows)]
    slower = [r for r in seeming if math.isnan(r.by_chance) or r.by_chance < SURELY]
    names = "; ".join(f"{r.model}, {r.contestant} {r.setting}".strip() for r in slower)
    exceptions = f"; slower than {names}" if slower else ""
    turns = sum(not math.isnan(r.by_chance) for r in seeming)
    again = f" ({turns} of them in turns with each other)" if turns else ""
    is_auto, peak = pl.col("contestant") == AUTO, pl.col("peak_bytes")
    measured = frame_of(RematRow, rows).filter(pl.col("note") == "", pl.col("contestant") != EAGER)
    least = measured.group_by("model").agg(peak.filter(is_auto).min().alias("ours"), peak.filter(~is_auto).min())
    models = least.drop_nulls("peak_bytes")
    leanest = models.filter(pl.col("ours") <= peak)
    return (
        f"{AUTO} was no slower than {len(compared) - len(slower)} of {len(compared)} points of other methods within "
        f"the same peak{again}{exceptions}. Its smallest peak was at or below all of theirs for {leanest.height} of "
        f"{models.height} models."
    )


def seemed_slower(rows: Sequence[RematRow]) -> list[tuple[RematRow, RematRow]]:
    """Return pairs of `AUTO`'s fastest plan within a contestant's peak and the contestant, where the plan was slower.

    Both were measured in turns with plain PyTorch.
    """
    others = [r for r in rows if r.contestant not in (AUTO, EAGER) and not r.note]
    pairs = [(ours, r) for r in others if (ours := fastest_within(rows, r)) is not None]
    return [(ours, theirs) for ours, theirs in pairs if ours.overhead > theirs.overhead]


def fastest_within(rows: Sequence[RematRow], of: RematRow) -> RematRow | None:
    """Return `AUTO`'s plan with least overhead that took no more memory than a row; None where there is none."""
    ours = [r for r in rows if (r.model, r.contestant) == (of.model, AUTO) and not r.note]
    return min((r for r in ours if r.peak_bytes <= of.peak_bytes), key=lambda r: r.overhead, default=None)


def picture(rows: Sequence[RematRow]) -> bytes:
    """Draw overhead against peak, a panel for each model, as PNG."""
    models = dict.fromkeys(r.model for r in rows)
    return render(lambda: remat_figure({m: panel_of([r for r in rows if r.model == m]) for m in models}))[1]


def panel_of(rows: Sequence[RematRow]) -> Panel:
    """Return the measured points of one model; methods and peers keep the order of the rows."""
    methods: dict[str, list[Point]] = {r.contestant: [] for r in rows if r.contestant in NAMES}
    peers: dict[str, list[Point]] = {r.contestant: [] for r in rows if r.contestant not in NAMES}
    measured = sorted((r for r in rows if not r.note), key=lambda r: r.peak_bytes)
    for r in measured:
        point = Point(r.peak_bytes, r.overhead, r.predicted_peak_bytes, r.predicted_overhead)
        (methods if r.contestant in NAMES else peers)[r.contestant].append(point)
    if not measured or measured[0].activation_share == measured[-1].activation_share:
        return Panel(methods, peers)
    least, most = measured[0], measured[-1]
    activations = (most.peak_bytes - least.peak_bytes) / (most.activation_share - least.activation_share)
    return Panel(methods, peers, round(least.peak_bytes - least.activation_share * activations), round(activations))
