"""Rematerialization, measured: models × activation budgets × methods, beside what others do against memory.

Every point is a process of its own that takes turns, iteration by iteration, with one of plain PyTorch: what slows the
machine slows both. Peaks come from the allocator's events. An iteration is forward and backward; gradients stay.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stowage.flows._project import find_root
from stowage.flows._remat_names import EAGER, MEMORY_BUDGET, Size
from stowage.flows._served import Served
from stowage.stages.ir.activations import activation_share
from stowage.stages.ir.errors import MIB, ParameterError, StowageError
from stowage.stages.ir.table import write_atomically, write_rows
from stowage.stages.report.figures import render
from stowage.stages.report.remat import Point, remat_figure
from stowage.stages.settings.sizes import parse_percentage

SHARES = (0.3, 0.4, 0.5, 0.65, 0.8)
METHODS = ("auto", "rockmate")
DEFAULT_MODELS = ("unet", "transformer", "mixer", "gpt2")
MEMORY_BUDGETS = (0.1, 0.3, 0.5, 0.7)
"""Values of PyTorch's `activation_memory_budget`; 1 keeps what its partitioner keeps."""

NAN = float("nan")


@dataclass(frozen=True)
class RematRow:
    """One point.

    Attributes:
        model: its name.
        contestant: a method of planning, or a peer.
        setting: the share of keep-all's activation budget that was asked for (`50%`), `smallest` for the method's
            smallest feasible budget, or a peer's value.
        budget_bytes, predicted_peak_bytes: of the device; -1 for peers.
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


@dataclass(frozen=True)
class RematJob:
    """What to measure.

    Attributes:
        models: names in `_remat_models.MODELS`.
        methods: of planning, as for `fit`.
        shares: of keep-all's activation budget.
        memory_budgets: values of PyTorch's own.
        peers: what stands beside; all that apply by default.
        rounds: iterations timed of each point.
        size, depth: of the models.
        quick: plan in seconds.
        threads: of PyTorch in every process, 0 for its default.
        limit_s: a point that does not answer for so long is left out.
    """

    models: tuple[str, ...] = DEFAULT_MODELS
    methods: tuple[str, ...] = METHODS
    shares: tuple[float, ...] = SHARES
    memory_budgets: tuple[float, ...] = MEMORY_BUDGETS
    peers: tuple[str, ...] | None = None
    rounds: int = 7
    size: Size = "small"
    depth: int | None = None
    quick: bool = False
    threads: int = 0
    limit_s: float = 900.0


def job_of(models: str, methods: str, shares: str, *, rounds: int, threads: int, quick: bool) -> RematJob:
    """From what is written on a command line: names with commas, shares in percent; empty for the defaults.

    Raises:
        ParameterError: a share is not a percentage.
    """
    percentages = tuple(parse_percentage(f"{text.removesuffix('%')}%", "--shares") for text in words(shares))
    return RematJob(
        models=words(models) or DEFAULT_MODELS,
        methods=words(methods) or METHODS,
        shares=percentages or SHARES,
        rounds=rounds,
        threads=threads,
        quick=quick,
    )


def words(text: str) -> tuple[str, ...]:
    """What is between commas."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


@dataclass
class _Turns:
    """A contestant and plain PyTorch, in turns."""

    eager: Served
    rounds: int

    def measure(self, point: Served) -> dict[str, Any]:
        """Peak, times and equality of one point; `point` may be plain PyTorch itself."""
        own, theirs = [point.ask([0])], [self.eager.ask([0])]
        point.ask(1)  # the first iteration without the profiler is not timed
        for seed in range(2, self.rounds + 2):
            theirs.append(self.eager.ask(seed))
            own.append(point.ask(seed))
        ratios = [a["time_s"] / b["time_s"] for a, b in zip(own[1:], theirs[1:], strict=True)]
        return {
            "peak_bytes": own[0]["peak_bytes"],
            "eager_peak_bytes": theirs[0]["peak_bytes"],
            "time_s": statistics.median(a["time_s"] for a in own[1:]),
            "eager_time_s": statistics.median(b["time_s"] for b in theirs[1:]),
            "overhead": statistics.median(ratios) - 1,
            "rounds": self.rounds,
            "equal": [a["digest"] for a in own] == [b["digest"] for b in theirs],
        }


def remat_rows(
    job: RematJob, home: Path, root: Path, say: Callable[[str], None] = lambda text: None
) -> Iterator[RematRow]:
    """Every point of every model, peers first.

    Raises:
        StowageError: a model cannot be traced or planned at all.
    """
    for model in job.models:
        yield from _model_rows(job, model, home, root, say)


def _model_rows(job: RematJob, model: str, home: Path, root: Path, say: Callable[[str], None]) -> Iterator[RematRow]:
    common = {
        "model": model,
        "size": job.size,
        "depth": job.depth,
        "home": str(home),
        "quick": job.quick,
        "threads": job.threads,
    }

    def enter(name: str, **what: Any) -> Served:
        environment = {"OMP_NUM_THREADS": str(job.threads)} if job.threads else {}
        request = common | what
        return Served(
            name, "stowage.flows._remat_contestant", request, root, limit_s=job.limit_s, environment=environment
        )

    planner = enter(f"planner of {model}", runs="planner")
    about = planner.about
    try:
        wanted = [(m, s) for m in job.methods for s in (*job.shares, None)]
        plans = {(method, share): planner.ask([method, share]) for method, share in wanted}
    finally:
        planner.close()
    say(f"{model}: {about['calls']} calls, planned for {len(plans)} budgets")
    eager = enter(EAGER, runs=EAGER, setting=1.0)
    turns = _Turns(eager, job.rounds)

    def point(row: dict[str, Any], **what: Any) -> RematRow:
        base = {"model": model, **row}
        try:
            served = enter(f"{row['contestant']} {row['setting']}".strip(), **what)
            try:
                found = turns.measure(served)
            finally:
                served.close()
        except StowageError as error:
            return RematRow(**base, note=str(error))
        base |= served.about  # of a peer: how it is done
        share = activation_share(about["fixed_bytes"], about["keep_all_peak_bytes"], found["peak_bytes"])
        return RematRow(**base, **found, activation_share=share)

    try:
        for name in (n for n in about["peers"] if job.peers is None or n in job.peers):
            for value in job.memory_budgets if name == MEMORY_BUDGET else (1.0,):
                setting = f"{value:g}" if name == MEMORY_BUDGET else ""
                made = point({"contestant": name, "setting": setting}, runs=name, setting=value)
                say(describe(made))
                yield made
        for (method, share), plan in plans.items():
            setting = "smallest" if share is None else f"{share:.0%}"
            row = {"contestant": method, "setting": setting, "budget_bytes": plan["budget"]}
            if "why" in plan:
                made = RematRow(model=model, **row, note=f"no plan: {plan['why']}")
            else:
                row |= {k: plan[k] for k in ("predicted_peak_bytes", "predicted_overhead", "found_by", "plan_s")}
                made = point(row, runs="plan", method=method, budget=plan["budget"])
            say(describe(made))
            yield made
    finally:
        eager.close()


def describe(row: RematRow) -> str:
    """One line for people."""
    name = f"{row.model}, {row.contestant} {row.setting}".strip()
    if row.note:
        return f"{name}: {row.note}"
    predicted = f" (predicted {row.predicted_overhead:+.1%})" if row.predicted_peak_bytes >= 0 else ""
    return (
        f"{name}: {row.peak_bytes / MIB:,.1f} MiB ({row.activation_share:.0%} of keep-all's activations), overhead "
        f"{row.overhead:+.1%}{predicted}, {'equal' if row.equal else 'not equal'}"
    )


def markdown_of(rows: Sequence[RematRow]) -> str:
    """The rows as a Markdown table."""
    lines = [
        "| model | contestant | setting | budget | peak | activations | overhead | predicted | planned in | equal |",
        "|---|---|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    for r in rows:
        planned = r.predicted_peak_bytes >= 0
        budget = f"{r.budget_bytes / MIB:,.1f} MiB" if r.budget_bytes >= 0 else ""
        if r.note:
            lines.append(f"| {r.model} | {r.contestant} | {r.setting} | {budget} | {r.note} | | | | | |")
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
            f"{r.plan_s:.1f} s" if planned else "",
            "yes" if r.equal else "no",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def picture(rows: Sequence[RematRow]) -> bytes:
    """Overhead against peak for the rows of one model, as PNG."""
    lines: dict[str, list[Point]] = {}
    for r in sorted(rows, key=lambda r: r.peak_bytes):
        if not r.note:
            found = Point(r.peak_bytes, r.overhead, r.predicted_peak_bytes, r.predicted_overhead)
            lines.setdefault(r.contestant, []).append(found)
    return render(lambda: remat_figure(rows[0].model, lines))[1]


def run_remat(
    job: RematJob, folder: Path, say: Callable[[str], None], home: Path | None = None, root: Path | None = None
) -> str:
    """Measure, write `remat.parquet`, `remat.md` and a picture a model into `folder`, and return the table.

    Args:
        job: what to measure.
        folder: where to write.
        say: receives a line a point.
        home: stores of costs, options and plans; empty ones by default.
        root: a folder of the project; the current folder by default.

    Raises:
        ParameterError: a model is not known.
        StowageError: a model cannot be traced or planned at all.
    """
    from stowage.flows._remat_models import MODELS  # imports torch

    if unknown := [name for name in job.models if name not in MODELS]:
        raise ParameterError(f"--models names {', '.join(unknown)}: take some of {', '.join(MODELS)}.")
    rows: list[RematRow] = []
    with tempfile.TemporaryDirectory() as empty:
        for row in remat_rows(job, home or Path(empty), root or find_root(), say):
            rows.append(row)
            write_rows(folder / "remat.parquet", RematRow, rows)  # a run that is cut off keeps what it has
    for model in job.models:
        write_atomically(folder / f"remat_{model}.png", picture([r for r in rows if r.model == model]))
    table = markdown_of(rows)
    write_atomically(folder / "remat.md", (table + "\n").encode())
    return table
