"""Measures rematerialization: models × activation budgets × methods, beside what others do to save memory.

Every point is a process of its own that takes turns, iteration by iteration, with one of plain PyTorch: what slows the
machine slows both. Peaks come from the allocator's events. An iteration is forward and backward; gradients stay.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stowage.flows.benchmarks.child_process import Served
from stowage.flows.benchmarks.remat.names import EAGER, MEMORY_BUDGET, TITLES, Size
from stowage.flows.benchmarks.remat.requested_plans import Asked, Plan, Planners
from stowage.flows.benchmarks.remat.rows import (
    RematRow,
    describe,
    describe_comparison,
    markdown_of,
    picture,
    seemed_slower,
    unlike_predicted,
)
from stowage.flows.benchmarks.remat.summary import summary_of
from stowage.flows.benchmarks.remat.turns import Turns
from stowage.flows.pipeline.project import find_root
from stowage.stages.ir.activations import activation_share
from stowage.stages.ir.errors import ParameterError, StowageError
from stowage.stages.ir.files import write_atomically
from stowage.stages.ir.table import read_rows, write_rows
from stowage.stages.settings.sizes import parse_percentage

SHARES = (0.3, 0.5, 0.65)
"""Shares of keep-all's activation budget, by default."""

METHODS = ("auto", "rotor", "chen_sqrt")
"""Methods of planning, by default."""

PREDICTED = (
    "predicted_peak_bytes",
    "predicted_time_s",
    "predicted_overhead",
    "plain_time_s",
    "found_by",
    "plan_s",
)
MEASURED = (
    "peak_bytes",
    "activation_share",
    "eager_peak_bytes",
    "time_s",
    "eager_time_s",
    "overhead",
    "rounds",
    "equal",
    "note",
    "processes",
)
"""Columns that are measured; methods that find the same plan share its measurement."""

SECOND_LOOK = 15
"""Least number of rounds of a plan and a contestant that seemed faster within the same peak, in turns."""

PROCESSES = 3
"""Number of processes that measure a plan which took another time than predicted in the first."""

MEMORY_BUDGETS = (0.1, 0.3, 0.5, 0.7)
"""Values of PyTorch's `activation_memory_budget`; 1 keeps what its partitioner keeps."""


@dataclass(frozen=True)
class RematJob:
    """The points to measure.

    Attributes:
        models: names in `models.MODELS`.
        methods: methods of planning, as for `fit`.
        shares: shares of keep-all's activation budget.
        memory_budgets: values of PyTorch's `activation_memory_budget`.
        peers: the peers to compare with; all that apply by default.
        rounds: iterations timed of each point, at least.
        timed_s: see `Turns`.
        size: size of the models.
        depth: depth of the models; None for their own.
        quick: plan in seconds.
        threads: threads of PyTorch in every process, 0 for its default.
        limit_s: seconds after which a point that does not answer is left out.
        planning_limit_s: seconds after which a plan is left out; the first makes the options of all blocks.
    """

    models: tuple[str, ...] = tuple(TITLES)
    methods: tuple[str, ...] = METHODS
    shares: tuple[float, ...] = SHARES
    memory_budgets: tuple[float, ...] = MEMORY_BUDGETS
    peers: tuple[str, ...] | None = None
    rounds: int = 7
    timed_s: float = 10.0
    size: Size = "small"
    depth: int | None = None
    quick: bool = False
    threads: int = 0
    limit_s: float = 900.0
    planning_limit_s: float = 3600.0


def job_of(models: str, methods: str, shares: str, *, rounds: int, threads: int, quick: bool) -> RematJob:
    """Make the job from a command line: names with commas, shares in percent; empty for the defaults.

    Raises:
        ParameterError: a share is not a percentage.
    """
    percentages = tuple(parse_percentage(f"{text.removesuffix('%')}%", "--shares") for text in words(shares))
    return RematJob(
        models=words(models) or tuple(TITLES),
        methods=words(methods) or METHODS,
        shares=percentages or SHARES,
        rounds=rounds,
        threads=threads,
        quick=quick,
    )


def words(text: str) -> tuple[str, ...]:
    """Split a text at its commas."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def remat_rows(
    job: RematJob, stores: Path, root: Path, say: Callable[[str], None] = lambda text: None
) -> Iterator[RematRow]:
    """Measure every point of every model, peers first; what cannot be traced, planned or run is a row that says why.

    A plan that took another time than predicted is yielded a second time, measured in more processes; so is a point
    beside
    which `AUTO` seemed slower, compared with it. The later row counts.
    """
    for model in job.models:
        try:
            yield from _Model(job, model, stores, root, say).rows()
        except StowageError as error:
            made = RematRow(model=model, contestant=EAGER, setting="", note=str(error))
            say(describe(made))
            yield made


@dataclass(frozen=True)
class _Model:
    """One model with all its contestants."""

    job: RematJob
    name: str
    stores: Path
    root: Path
    say: Callable[[str], None]

    def rows(self) -> Iterator[RematRow]:
        """Measure the peers, plan for every budget and for the peers' peaks, then measure the plans.

        Measure again where a plan is not as predicted, or where another contestant seemed faster.
        """
        rows: list[RematRow] = []
        for row in self._once():
            rows.append(row)
            self.say(describe(row))
            yield row
        for same in unlike_predicted(rows):
            try:
                measured = self._in_more_processes(same[0])
            except StowageError as error:
                self.say(str(error))
                continue
            for row in same:
                rows[rows.index(row)] = row = replace(row, **{name: getattr(measured, name) for name in MEASURED})
                self.say(f"again, {describe(row)}")
                yield row
        for ours, theirs in seemed_slower(rows):
            try:
                row = self._looked_again(ours, theirs)
            except StowageError as error:
                self.say(str(error))
                continue
            self.say(describe_comparison(ours, row))
            yield row

    def _once(self) -> Iterator[RematRow]:
        with contextlib.ExitStack() as stack:
            planner = Planners(lambda: self._enter(f"planner of {self.name}", runs="planner"))
            stack.callback(planner.close)
            eager = stack.enter_context(contextlib.closing(self._enter(EAGER, runs=EAGER, setting=1.0)))
            peaks: list[int] = []
            for row in self._peers(eager, planner.about):
                peaks.append(row.peak_bytes)
                yield row
            started = time.perf_counter()
            plans = planner.plans(self.job.methods, self.job.shares, [peak for peak in peaks if peak >= 0])
            planner.close()
            calls, taken = planner.about["calls"], time.perf_counter() - started
            self.say(f"{self.name}: {calls} calls, planned for {len(plans)} budgets in {taken:.0f} s")
            yield from self._planned(eager, planner.about, plans)

    def _enter(self, name: str, **what: Any) -> Served:
        job = self.job
        limit_s = job.planning_limit_s if what["runs"] == "planner" else job.limit_s
        common = {
            "model": self.name,
            "size": job.size,
            "depth": job.depth,
            "stores": str(self.stores),
            "quick": job.quick,
            "threads": job.threads,
        }
        environment = {"OMP_NUM_THREADS": str(job.threads)} if job.threads else {}
        module = "stowage.flows.benchmarks.remat.contestant"
        return Served(name, module, common | what, self.root, limit_s=limit_s, environment=environment)

    def _contestant(self, row: RematRow) -> Served:
        """Start the process of a row that is to be measured."""
        name = f"{row.contestant} {row.setting}".strip()
        if row.predicted_peak_bytes >= 0:
            return self._enter(name, runs="plan", method=row.contestant, budget=row.budget_bytes)
        return self._enter(name, runs=row.contestant, setting=float(row.setting or 1.0))

    def _peers(self, eager: Served, about: dict[str, Any]) -> Iterator[RematRow]:
        for name in (n for n in about["peers"] if self.job.peers is None or n in self.job.peers):
            for value in self.job.memory_budgets if name == MEMORY_BUDGET else (1.0,):
                row = RematRow(self.name, name, f"{value:g}" if name == MEMORY_BUDGET else "")
                if name == EAGER:
                    row = replace(row, predicted_time_s=about["keep_all_time_s"], plain_time_s=about["plain_time_s"])
                yield self._point(eager, about, row)

    def _planned(self, eager: Served, about: dict[str, Any], plans: Mapping[Asked, Plan]) -> Iterator[RematRow]:
        known: dict[str, RematRow] = {}
        for asked, plan in plans.items():
            row = RematRow(self.name, asked.method, asked.setting, plan["budget"])
            if "why" in plan:
                yield replace(row, note=f"no plan: {plan['why']}")
                continue
            row = replace(row, **{name: plan[name] for name in PREDICTED})
            if same := known.get(plan["plan_hash"]):
                yield replace(row, **{name: getattr(same, name) for name in MEASURED})
                continue
            row = self._point(eager, about, row)
            known[plan["plan_hash"]] = row
            yield row

    def _point(self, eager: Served, about: dict[str, Any], row: RematRow) -> RematRow:
        turns = Turns(self.job.rounds, self.job.timed_s)
        try:
            with contextlib.closing(self._contestant(row)) as served:
                found = turns.measure(served, eager)
        except StowageError as error:
            return replace(row, note=str(error))
        share = activation_share(about["fixed_bytes"], about["keep_all_peak_bytes"], found["peak_bytes"])
        return replace(row, **served.about, **found, activation_share=share)  # `about` of a peer has `found_by`

    def _in_more_processes(self, row: RematRow) -> RematRow:
        """Return the median of three measurements, each beside a process of plain PyTorch of its own.

        Where the system places a process' memory is chance that no number of rounds averages out.
        """
        found, turns = [row], Turns(self.job.rounds, self.job.timed_s)
        while len(found) < PROCESSES:
            with contextlib.ExitStack() as stack:
                eager = stack.enter_context(contextlib.closing(self._enter(EAGER, runs=EAGER, setting=1.0)))
                plan = stack.enter_context(contextlib.closing(self._contestant(row)))
                found.append(replace(row, **turns.measure(plan, eager)))
        middle = sorted(found, key=lambda r: r.overhead)[len(found) // 2]
        peak_bytes, equal = max(r.peak_bytes for r in found), all(r.equal for r in found)
        return replace(middle, peak_bytes=peak_bytes, equal=equal, processes=len(found))

    def _looked_again(self, ours: RematRow, theirs: RematRow) -> RematRow:
        turns = Turns(max(self.job.rounds, SECOND_LOOK), self.job.timed_s)
        with contextlib.closing(self._contestant(ours)) as plan, contextlib.closing(self._contestant(theirs)) as other:
            ratio, chance = turns.compare(plan, other)
        return replace(theirs, ours_over_it=ratio, by_chance=chance)


def run_remat(
    job: RematJob, folder: Path, say: Callable[[str], None], stores: Path | None = None, root: Path | None = None
) -> str:
    """Measure, write rows, tables and pictures into `folder`, and return the table.

    They are `remat.parquet`, `remat.md`, `remat_summary.md`, a picture a model, and `remat.png` with all of them.

    Args:
        job: what to measure.
        folder: where to write; what an earlier run wrote there of other models stays, in the tables too.
        say: receives a line a point.
        stores: folder of stores of costs, options and plans; empty ones by default.
        root: a folder of the project; the current folder by default.

    Raises:
        ParameterError: a model is not known.
        TableError: `remat.parquet` in `folder` is damaged or of another version.
    """
    from stowage.flows.benchmarks.remat.models import MODELS  # imports torch

    if unknown := [name for name in job.models if name not in MODELS]:
        raise ParameterError(f"--models names {', '.join(unknown)}: take some of {', '.join(MODELS)}.")
    path = folder / "remat.parquet"
    before = read_rows(path, RematRow) if path.exists() else []
    found = {(r.model, r.contestant, r.setting): r for r in before if r.model not in job.models}
    with tempfile.TemporaryDirectory() as empty:
        for row in remat_rows(job, stores or Path(empty), root or find_root(), say):
            found[row.model, row.contestant, row.setting] = row
            write_rows(path, RematRow, _in_order(found.values()))  # a run that is cut off keeps what it has
    rows = _in_order(found.values())
    for model in job.models:
        write_atomically(folder / f"remat_{model}.png", picture([r for r in rows if r.model == model]))
    write_atomically(folder / "remat.png", picture(rows))
    table = markdown_of(rows)
    write_atomically(folder / "remat.md", (table + "\n").encode())
    write_atomically(folder / "remat_summary.md", (summary_of(rows) + "\n").encode())
    return table


def _in_order(rows: Iterable[RematRow]) -> list[RematRow]:
    """Sort rows by model, in the order of tables."""
    places = {model: place for place, model in enumerate(TITLES)}
    return sorted(rows, key=lambda r: places.get(r.model, len(places)))
