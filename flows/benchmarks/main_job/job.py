"""Measures the main job of `params.yaml` at several budgets, beside plain PyTorch and gradient checkpointing.

Contestants live in processes of their own and take turns step by step: a machine that slows down slows them all.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import polars as pl
from rich.progress import track

from stowage.flows.benchmarks.child_process import Served
from stowage.flows.benchmarks.markdown import markdown
from stowage.flows.benchmarks.remat.names import MEMORY_BUDGET
from stowage.flows.benchmarks.results import OUT
from stowage.flows.pipeline.prefect_imports import flow
from stowage.flows.pipeline.project import find_root
from stowage.stages.ir.errors import MIB
from stowage.stages.ir.files import write_atomically
from stowage.stages.ir.table import write_rows
from stowage.stages.report.frames import frame_of
from stowage.stages.settings.load import read_parameters

MEMORY_BUDGETS = (0.5, 0.2)
"""Values of PyTorch's `activation_memory_budget`; 1 keeps what its partitioner keeps."""

COLUMNS = (
    "",
    "budget",
    "predicted peak",
    "measured peak",
    "of plain",
    "step time",
    "× plain",
    "recomputed",
    "planned in",
    "same losses",
)


@dataclass(frozen=True)
class BenchmarkRow:
    """One contestant's results.

    Attributes:
        contestant: its name.
        budget_bytes: the device budget it was given, -1 for none.
        predicted_peak_bytes: peak that its plan predicts, -1 without a plan.
        predicted_time_s: step time that its plan predicts, NaN without a plan.
        peak_bytes: measured peak, from the allocator's events, parameters and optimizer states included.
        peak_ratio: ratio of the peak to plain PyTorch's.
        time_s: median over rounds.
        time_ratio: median over rounds of the ratio to plain PyTorch's step in the same round.
        rounds: number of steps timed.
        plan_s: time to plan in this run.
        recomputed_fraction: share of the activation bytes that is recomputed.
        variant: the rewrite of the trace that was planned.
        losses_equal: all losses are plain PyTorch's, bit for bit.
    """

    contestant: str
    budget_bytes: int
    predicted_peak_bytes: int
    predicted_time_s: float
    peak_bytes: int
    peak_ratio: float
    time_s: float
    time_ratio: float
    rounds: int
    plan_s: float
    recomputed_fraction: float
    variant: str
    losses_equal: bool


class Contestant(Served):
    """A process that takes steps when asked."""

    def __init__(self, name: str, request: dict[str, Any], root: Path) -> None:
        self.budget = int(request.get("budget", -1))
        self.times: list[float] = []
        self.losses: list[float] = []
        self.peak_bytes = -1
        super().__init__(name, "stowage.flows.benchmarks.main_job.contestant", request, root)

    def measure(self) -> None:
        """Run one step under the profiler, and note its peak and loss."""
        answer = self.ask("measure")
        self.peak_bytes = max(self.peak_bytes, answer["peak_bytes"])
        self.losses.append(answer["loss"])

    def step(self, *, timed: bool) -> None:
        """Run one step, and note its loss, and its time if `timed`."""
        answer = self.ask("step")
        self.losses.append(answer["loss"])
        if timed:
            self.times.append(answer["time_s"])

    def row(self, eager: Contestant) -> BenchmarkRow:
        """Return what was found, relative to plain PyTorch."""
        ratios = [mine / theirs for mine, theirs in zip(self.times, eager.times, strict=True)]
        return BenchmarkRow(
            contestant=self.name,
            budget_bytes=self.budget,
            predicted_peak_bytes=self.about.get("predicted_peak_bytes", -1),
            predicted_time_s=self.about.get("predicted_step_time_s", float("nan")),
            peak_bytes=self.peak_bytes,
            peak_ratio=self.peak_bytes / eager.peak_bytes,
            time_s=statistics.median(self.times),
            time_ratio=statistics.median(ratios),
            rounds=len(self.times),
            plan_s=self.about.get("plan_s", 0.0),
            recomputed_fraction=self.about.get("recomputed_fraction", 0.0),
            variant=self.about.get("variant", ""),
            losses_equal=self.losses == eager.losses,
        )


@flow(name="benchmark")
def benchmark(rounds: int = 7, cold: bool = False, root: Path | None = None) -> list[BenchmarkRow]:
    """Measure the main job of `params.yaml` at several budgets.

    The budgets are 50% and 65% of plain PyTorch's peak, and the peak of gradient checkpointing. Beside them is PyTorch
    compiled with some activation memory budgets of its own, whose losses may differ.

    Args:
        rounds: timed steps of each contestant.
        cold: plan the first budget with an empty store, to time planning from nothing.
        root: a folder of the project; the current folder by default.

    Raises:
        StowageError: a parameter is wrong, or a contestant failed.
    """
    folder = find_root(root)
    params = read_parameters(folder / "params.yaml")
    contestants: list[Contestant] = []
    with tempfile.TemporaryDirectory() as empty:
        store = empty if cold else str(folder / ".stowage")

        def enter(name: str, method: str, **more: Any) -> Contestant:
            request = {"params": params, "method": method, "store": store, **more}
            contestant = Contestant(name, request, folder)
            contestants.append(contestant)
            contestant.step(timed=False)
            contestant.measure()
            return contestant

        try:
            eager = enter("plain PyTorch", "eager")
            checkpointing = enter("gradient checkpointing", "gradient_checkpointing")
            for setting in MEMORY_BUDGETS:
                enter(f"{MEMORY_BUDGET} {setting}", MEMORY_BUDGET, setting=setting)
            enter("Stowage at 50%", "auto", budget=int(0.50 * eager.peak_bytes))
            enter("Stowage at 65%", "auto", budget=int(0.65 * eager.peak_bytes))
            enter("Stowage at checkpointing's peak", "auto", budget=checkpointing.peak_bytes)
            for _ in track(range(rounds), description="rounds"):
                for contestant in contestants:
                    contestant.step(timed=True)
            rows = [c.row(eager) for c in contestants]
        finally:
            for contestant in contestants:
                contestant.close()
    write_rows(folder / OUT / "main.parquet", BenchmarkRow, rows)
    plain = [{k: None if v != v else v for k, v in asdict(r).items()} for r in rows]  # JSON has no NaN
    text = json.dumps(plain, indent=2) + "\n"
    write_atomically(folder / OUT / "main.json", text.encode())
    return rows


def markdown_of(rows: list[BenchmarkRow]) -> str:
    """Return the rows as a Markdown table, as README shows it."""
    planned = pl.col("predicted_peak_bytes") >= 0
    of_plans = [pl.when(planned).then(c) for c in ("predicted_peak_bytes", "recomputed_fraction", "plan_s")]
    frame = frame_of(BenchmarkRow, rows).select(
        "contestant",
        pl.when(pl.col("budget_bytes") >= 0).then("budget_bytes"),
        of_plans[0],
        "peak_bytes",
        "peak_ratio",
        "time_s",
        pl.struct("time_ratio", planned.alias("planned")).alias("time_ratio"),
        *of_plans[1:],
        "losses_equal",
    )
    return markdown(
        frame,
        headings=dict(zip(frame.columns, COLUMNS, strict=True)),
        formats={
            "budget_bytes": lambda x: f"{x / MIB:,.0f} MiB",
            "predicted_peak_bytes": _mib,
            "peak_bytes": _mib,
            "peak_ratio": _percent,
            "time_s": lambda x: f"{x:.2f} s",
            "time_ratio": lambda x: f"**{x['time_ratio']:.2f}**" if x["planned"] else f"{x['time_ratio']:.2f}",
            "recomputed_fraction": _percent,
            "plan_s": lambda x: f"{x:.0f} s",
        },
        right=("losses_equal",),
    )


def _mib(nbytes: int) -> str:
    return f"{nbytes / MIB:,.1f} MiB"


def _percent(share: float) -> str:
    return f"{share:.0%}"
