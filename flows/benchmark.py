"""Measure what the documents claim, as ratios within one run.

python -m stowage.flows.benchmark                 the main job of params.yaml: plans at several budgets beside plain
                                                  PyTorch and the model's own gradient checkpointing
python -m stowage.flows.benchmark --rounds 11     more rounds, steadier medians
python -m stowage.flows.benchmark --cold          the same with empty stores: the first plan is made from nothing
python -m stowage.flows.benchmark --first-minute  time planning of the main job with nothing stored, and again
python -m stowage.flows.benchmark --big           time planning Llama2-7B and Llama-3-70B without weights in memory
python -m stowage.flows.benchmark --growth        time every stage of planning for 8 to 128 layers, and plot it
python -m stowage.flows.benchmark --quarter       train in a quarter of the memory that plain PyTorch needs, by the
                                                  kernel's judgement
python -m stowage.flows.benchmark --papers        plan Table 2 of the OffMate preprint on its machines
python -m stowage.flows.benchmark --remat         rematerialization of models that are no chain, beside what others do:
                                                  overhead against peak, measured and predicted
python -m stowage.flows.benchmark --remat-depth   time planning of deeper and deeper Transformers and GPT-2; --measured:
                                                  as `fit` plans, on measured instead of estimated costs
python -m stowage.flows.benchmark --cluster-sizes plan a Transformer and GPT-2 as one block by clusters of several sizes
python -m stowage.flows.benchmark --partition     time H-Partition on graphs of 10^3 to 10^6 nodes, and plot it
python -m stowage.flows.benchmark --elixir        simulate the tables of the Elixir paper (several GPUs), beside its own
python -m stowage.flows.benchmark --host          time the host alone: a card's plans over a device with nothing to do

--write FOLDER (docs/measured), with any of these, keeps what was measured as data there and writes the pages from it;
--render FOLDER writes the pages again without measuring.

Contestants live in processes of their own and take turns step by step: a machine that slows down slows them all.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import polars as pl
import typer
from rich.progress import track

from stowage.flows.benchmarks.child_process import Served
from stowage.flows.benchmarks.markdown import markdown
from stowage.flows.pipeline.command import one_sentence, run_command
from stowage.flows.pipeline.prefect_imports import flow
from stowage.flows.pipeline.project import find_root
from stowage.stages.ir.errors import MIB
from stowage.stages.ir.files import write_atomically
from stowage.stages.ir.table import write_rows
from stowage.stages.report.frames import frame_of
from stowage.stages.settings.load import read_parameters

OUT = Path("artifacts") / "benchmark"
"""Folder of results, in the project."""

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

    The budgets are 50% and 65% of plain PyTorch's peak, and the peak of gradient checkpointing.

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

        def enter(name: str, method: str, budget: int | None = None) -> Contestant:
            request = {"params": params, "method": method, "store": store}
            contestant = Contestant(name, request | ({"budget": budget} if budget else {}), folder)
            contestants.append(contestant)
            contestant.step(timed=False)
            contestant.measure()
            return contestant

        try:
            eager = enter("plain PyTorch", "eager")
            checkpointing = enter("gradient checkpointing", "gradient_checkpointing")
            enter("Stowage at 50%", "auto", int(0.50 * eager.peak_bytes))
            enter("Stowage at 65%", "auto", int(0.65 * eager.peak_bytes))
            enter("Stowage at checkpointing's peak", "auto", checkpointing.peak_bytes)
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


def _command_line() -> str:
    """Say how the benchmark was called, without where its pages go."""
    given = [word for word in sys.argv[1:] if not word.startswith("--write=") and word != "benchmark"]
    if "--write" in given:
        at = given.index("--write")
        given = given[:at] + given[at + 2 :]
    return " ".join(["python -m stowage.flows.benchmark", *given])


def main(
    rounds: Annotated[int, typer.Option(help="Timed steps of each contestant; of --remat at least.")] = 7,
    cold: Annotated[bool, typer.Option(help="Plan with an empty store first.")] = False,
    big: Annotated[bool, typer.Option(help="Instead, time planning Llama2-7B and Llama-3-70B.")] = False,
    growth: Annotated[bool, typer.Option(help="Instead, time planning of 8 to 128 layers.")] = False,
    quarter: Annotated[bool, typer.Option(help="Instead, train in a quarter of plain PyTorch's memory.")] = False,
    papers: Annotated[bool, typer.Option(help="Instead, plan the OffMate preprint's tables.")] = False,
    partition: Annotated[bool, typer.Option(help="Instead, time H-Partition up to 10^6 nodes.")] = False,
    host: Annotated[bool, typer.Option(help="Instead, time the host alone, beside plain PyTorch.")] = False,
    elixir: Annotated[bool, typer.Option(help="Instead, simulate the Elixir paper's tables.")] = False,
    remat: Annotated[bool, typer.Option(help="Instead, overhead against peak of models that are no chain.")] = False,
    remat_depth: Annotated[bool, typer.Option(help="Instead, time planning of deeper Transformers and GPT-2.")] = False,
    cluster_sizes: Annotated[bool, typer.Option(help="Instead, plan by clusters of several sizes.")] = False,
    models: Annotated[str, typer.Option(help="Of the last three: names, with commas.")] = "",
    methods: Annotated[str, typer.Option(help="Of the last three: of planning, with commas.")] = "",
    shares: Annotated[
        str, typer.Option(help="Of --remat and --cluster-sizes: percent of keep-all's activation budget.")
    ] = "",
    layers: Annotated[
        str, typer.Option(help="Of --remat-depth: numbers of layers, with commas; of --cluster-sizes one.")
    ] = "",
    sizes: Annotated[str, typer.Option(help="Of --cluster-sizes: members of a cluster at most, with commas.")] = "",
    threads: Annotated[int, typer.Option(help="Of --remat: threads of PyTorch, 0 for its default.")] = 0,
    quick: Annotated[bool, typer.Option(help="Of --remat and --cluster-sizes: plan in seconds, less well.")] = False,
    measured: Annotated[
        bool, typer.Option(help="Of --remat-depth: plan as `fit` does, on costs measured here instead of estimated.")
    ] = False,
    first_minute: Annotated[bool, typer.Option(help="Instead, time planning with nothing stored, and again.")] = False,
    write: Annotated[
        Path | None,
        typer.Option(help="A folder of pages, docs/measured: keep what is measured as data, write the pages."),
    ] = None,
    render: Annotated[
        Path | None, typer.Option(help="Instead, write the pages of a folder again from its data.")
    ] = None,
) -> None:
    """Measure the main job."""
    with one_sentence():
        if render is not None:
            from stowage.flows.benchmarks.pages.write import write_pages

            for path in write_pages(render.resolve()):
                typer.echo(path)
            return

        def finish(name: str) -> None:
            if write is not None:
                from stowage.flows.benchmarks.pages.publish import publish

                for path in publish(name, find_root() / OUT, write.resolve(), _command_line()):
                    typer.echo(path)

        if first_minute:
            from stowage.flows.benchmarks.main_job.first_minute import run_first_minute

            typer.echo(run_first_minute(find_root(), find_root() / OUT, typer.echo))
            finish("first_minute")
            return
        if big:
            from stowage.flows.benchmarks.scaling.big_model import plan_all  # imports torch

            plans = [asdict(plan) for plan in plan_all(typer.echo)]
            text = json.dumps(plans, indent=2) + "\n"
            write_atomically(find_root() / OUT / "big.json", text.encode())
            finish("big")
            return
        if growth:
            from stowage.flows.benchmarks.scaling.growth import run_growth

            typer.echo(run_growth(find_root() / OUT, typer.echo))
            finish("growth")
            return
        if quarter:
            from stowage.flows.benchmarks.limits.quarter import run_quarter

            typer.echo(run_quarter(typer.echo))
            finish("quarter")
            return
        if host:
            from stowage.flows.benchmarks.main_job.host_time import run_host_time

            typer.echo(run_host_time(find_root() / OUT))
            finish("host")
            return
        if elixir:
            from stowage.flows.benchmarks.elixir.run import run_elixir

            typer.echo(run_elixir(find_root() / OUT, typer.echo))
            finish("elixir")
            return
        if partition:
            from stowage.flows.benchmarks.scaling.partition_growth import run_partition_growth

            typer.echo(run_partition_growth(find_root() / OUT, typer.echo))
            finish("partition")
            return
        if remat:
            from stowage.flows.benchmarks.remat.points import job_of, run_remat

            job = job_of(models, methods, shares, rounds=rounds, threads=threads, quick=quick)
            typer.echo(run_remat(job, find_root() / OUT, typer.echo))
            finish("remat")
            return
        if remat_depth:
            from stowage.flows.benchmarks.scaling.depth import depth_job, run_depth

            typer.echo(run_depth(depth_job(models, methods, layers, measured=measured), find_root() / OUT, typer.echo))
            finish("remat_depth")
            return
        if cluster_sizes:
            from stowage.flows.benchmarks.scaling.cluster_sizes import cluster_size_job, run_cluster_sizes

            ablation = cluster_size_job(models, methods, sizes, shares, layers, quick=quick)
            typer.echo(run_cluster_sizes(ablation, find_root() / OUT, typer.echo))
            finish("cluster_sizes")
            return
        if papers:
            from stowage.flows.benchmarks.papers.tables import markdown_of as table_of
            from stowage.flows.benchmarks.papers.tables import paper_rows

            rows = list(paper_rows(say=typer.echo))
            write_rows(find_root() / OUT / "papers.parquet", type(rows[0]), rows)
            typer.echo(table_of(rows))
            finish("papers")
            return
        typer.echo(markdown_of(benchmark(rounds, cold)))
        finish("main_job")


if __name__ == "__main__":
    run_command(main)
