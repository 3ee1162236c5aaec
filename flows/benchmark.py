"""Measure what the documents claim, as ratios within one run; each claim is a command of its own.

python -m stowage.flows.benchmark                       the main job, as `main-job` does
python -m stowage.flows.benchmark main-job --rounds 11  more rounds, steadier medians
python -m stowage.flows.benchmark remat --help          what one of them takes
python -m stowage.flows.benchmark papers --write docs/measured
python -m stowage.flows.benchmark exact --write docs/measured
                                                        keep what was measured as data, and write the pages from it
python -m stowage.flows.benchmark render docs/measured  write the pages again without measuring
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from stowage.flows.benchmarks.results import results_of
from stowage.flows.pipeline.command import one_sentence, run_typer
from stowage.stages.ir.files import write_atomically
from stowage.stages.ir.table import write_rows

application = typer.Typer(name="benchmark", add_completion=False, rich_markup_mode=None)

Write = Annotated[
    Path | None, typer.Option(help="A folder of pages, docs/measured: keep what is measured as data, write the pages.")
]
Rounds = Annotated[int, typer.Option(help="Timed steps of each contestant.")]
Models = Annotated[str, typer.Option(help="Names, with commas; all by default.")]
Methods = Annotated[str, typer.Option(help="Methods of planning, with commas.")]
Shares = Annotated[str, typer.Option(help="Percent of keep-all's activation budget, with commas.")]
Quick = Annotated[bool, typer.Option(help="Plan in seconds, less well.")]


@application.callback(invoke_without_command=True)
def main(ctx: typer.Context) -> None:
    """Measure plans beside plain PyTorch, in turns: the main job of params.yaml, or what a command names."""
    if ctx.invoked_subcommand is None:
        main_job()


@application.command("main-job")
def main_job(
    rounds: Rounds = 7,
    cold: Annotated[bool, typer.Option(help="Plan with empty stores: the first plan is made from nothing.")] = False,
    write: Write = None,
) -> None:
    """Run the main job of params.yaml at several budgets, beside plain PyTorch and its own gradient checkpointing."""
    with results_of("main_job", write):
        from stowage.flows.benchmarks.main_job.job import benchmark, markdown_of

        typer.echo(markdown_of(benchmark(rounds, cold)))


@application.command("first-minute")
def first_minute(write: Write = None) -> None:
    """Time planning of the main job with nothing stored, and again."""
    with results_of("first_minute", write) as out:
        from stowage.flows.benchmarks.main_job.first_minute import run_first_minute

        typer.echo(run_first_minute(out.parents[1], out, typer.echo))


@application.command("host")
def host(write: Write = None) -> None:
    """Time the host alone: plans of a card over a device with nothing to do, beside plain PyTorch."""
    with results_of("host", write) as out:
        from stowage.flows.benchmarks.main_job.host_time import run_host_time

        typer.echo(run_host_time(out))


@application.command("quarter")
def quarter(write: Write = None) -> None:
    """Train in a quarter of the memory that plain PyTorch needs, by the kernel's judgement."""
    with results_of("quarter", write):
        from stowage.flows.benchmarks.limits.quarter import run_quarter

        typer.echo(run_quarter(typer.echo))


@application.command("remat")
def remat(
    models: Models = "",
    methods: Methods = "",
    shares: Shares = "",
    rounds: Annotated[int, typer.Option(help="Timed steps of each contestant at least.")] = 7,
    threads: Annotated[int, typer.Option(help="Threads of PyTorch, 0 for its default.")] = 0,
    quick: Quick = False,
    write: Write = None,
) -> None:
    """Measure recomputation in models that are no chain, beside what others do: overhead against peak."""
    with results_of("remat", write) as out:
        from stowage.flows.benchmarks.remat.points import job_of, run_remat

        job = job_of(models, methods, shares, rounds=rounds, threads=threads, quick=quick)
        typer.echo(run_remat(job, out, typer.echo))


@application.command("remat-depth")
def remat_depth(
    models: Models = "",
    methods: Methods = "",
    layers: Annotated[str, typer.Option(help="Numbers of layers, with commas.")] = "",
    measured: Annotated[bool, typer.Option(help="Plan as `fit` does, on costs measured here, not estimated.")] = False,
    write: Write = None,
) -> None:
    """Time planning of deeper and deeper Transformers and GPT-2."""
    with results_of("remat_depth", write) as out:
        from stowage.flows.benchmarks.scaling.depth import depth_job, run_depth

        typer.echo(run_depth(depth_job(models, methods, layers, measured=measured), out, typer.echo))


@application.command("cluster-sizes")
def cluster_sizes(
    models: Models = "",
    methods: Methods = "",
    sizes: Annotated[str, typer.Option(help="Members of a cluster at most, with commas.")] = "",
    shares: Shares = "",
    layers: Annotated[str, typer.Option(help="The number of layers.")] = "",
    quick: Quick = False,
    write: Write = None,
) -> None:
    """Plan a Transformer and GPT-2 as one block by clusters of several sizes."""
    with results_of("cluster_sizes", write) as out:
        from stowage.flows.benchmarks.scaling.cluster_sizes import cluster_size_job, run_cluster_sizes

        ablation = cluster_size_job(models, methods, sizes, shares, layers, quick=quick)
        typer.echo(run_cluster_sizes(ablation, out, typer.echo))


@application.command("growth")
def growth(write: Write = None) -> None:
    """Time every stage of planning for 8 to 128 layers, and plot it."""
    with results_of("growth", write) as out:
        from stowage.flows.benchmarks.scaling.growth import run_growth

        typer.echo(run_growth(out, typer.echo))


@application.command("partition")
def partition(write: Write = None) -> None:
    """Time H-Partition on graphs of 10^3 to 10^6 nodes, and plot it."""
    with results_of("partition", write) as out:
        from stowage.flows.benchmarks.scaling.partition_growth import run_partition_growth

        typer.echo(run_partition_growth(out, typer.echo))


@application.command("big")
def big(write: Write = None) -> None:
    """Time planning Llama2-7B and Llama-3-70B without weights in memory."""
    with results_of("big", write) as out:
        from stowage.flows.benchmarks.scaling.big_model import plan_all

        plans = [asdict(plan) for plan in plan_all(typer.echo)]
        write_atomically(out / "big.json", (json.dumps(plans, indent=2) + "\n").encode())


@application.command("papers")
def papers(write: Write = None) -> None:
    """Plan Table 2 of the OffMate preprint on its machines."""
    with results_of("papers", write) as out:
        from stowage.flows.benchmarks.papers.tables import markdown_of, paper_rows

        rows = list(paper_rows(say=typer.echo))
        write_rows(out / "papers.parquet", type(rows[0]), rows)
        typer.echo(markdown_of(rows))


@application.command("exact")
def exact(write: Write = None) -> None:
    """Solve the exact program of what is offloaded for the OffMate preprint's tasks."""
    with results_of("exact", write) as out:
        from stowage.flows.benchmarks.papers.exact import exact_rows

        rows = [{**asdict(row), "gap": row.gap} for row in exact_rows(typer.echo)]
        write_atomically(out / "exact.json", (json.dumps(rows, indent=2) + "\n").encode())


@application.command("elixir")
def elixir(write: Write = None) -> None:
    """Simulate the Elixir paper's tables of several GPUs, beside its own."""
    with results_of("elixir", write) as out:
        from stowage.flows.benchmarks.elixir.run import run_elixir

        typer.echo(run_elixir(out, typer.echo))


@application.command("elixir-plans")
def elixir_plans(
    batches: Annotated[str, typer.Option(help="Batches whose cells are planned, with commas.")] = "4,8,12,16",
    times: Annotated[bool, typer.Option(help="Plan for the table of planning time too.")] = True,
    write: Write = None,
) -> None:
    """Plan whole steps for the cells of those tables; a run that is cut off goes on where it was."""
    with results_of("elixir_plans", write) as out:
        from stowage.flows.benchmarks.elixir.run_plans import run_elixir_plans

        wanted = frozenset(int(batch) for batch in batches.split(",") if batch)
        typer.echo(run_elixir_plans(out, typer.echo, wanted, write, times=times))


@application.command("slimfit")
def slimfit(
    parts: Annotated[
        str, typer.Option(help="What to measure: accuracy, codes, saved, chosen, coded, static, lossy, pairs.")
    ] = "",
    names: Annotated[str, typer.Option(help="Tasks, models or techniques, with commas; all by default.")] = "",
    seeds: Annotated[int, typer.Option(help="How many seeds of each task.")] = 5,
    write: Write = None,
) -> None:
    """Train real tasks with a part of the model frozen, and measure what freezing and codes save."""
    with results_of("slimfit", write) as out:
        from stowage.flows.benchmarks.slimfit.run import run_parts

        typer.echo(run_parts(out, typer.echo, parts, names, seeds))


@application.command("several-gpus")
def several_gpus(
    model: Annotated[str, typer.Option(help="gpt2, which the page is of, or t5.")] = "gpt2",
    rounds: Annotated[int, typer.Option(help="Rounds in which each contestant is timed, in turn.")] = 3,
    write: Write = None,
) -> None:
    """Train on two ranks of this CPU under one plan, beside DistributedDataParallel and FSDP2."""
    with results_of("several_gpus", write) as out:
        from stowage.flows.benchmarks.gpu.ranks.rows import check_written, run_two_ranks

        check_written(model, written=write is not None)
        typer.echo(run_two_ranks(out, typer.echo, model, rounds=rounds))


@application.command("proven")
def proven(
    models: Models = "",
    budgets: Annotated[
        str, typer.Option(help="65%, 50%, 30%, smallest, measured, planning, eviction, with commas; all by default.")
    ] = "",
    anew: Annotated[bool, typer.Option(help="Measure also what an earlier run has kept.")] = False,
    write: Write = None,
) -> None:
    """Say how far our plans and others' are from a time that no schedule beats; a run that is cut off goes on."""
    with results_of("proven", write) as out:
        from stowage.flows.benchmarks.proven.run import run_proven

        pages = (write or out.parents[1] / "docs" / "measured").resolve()
        typer.echo(run_proven(out, pages, typer.echo, models, budgets, anew=anew))


@application.command("render")
def render(
    folder: Annotated[Path, typer.Argument(help="The folder of pages, with its data.")] = Path("docs/measured"),
) -> None:
    """Write the pages of a folder, and the tables of the README above it, again from its data."""
    with one_sentence():
        from stowage.flows.benchmarks.pages.write import write_pages

        for path in write_pages(folder.resolve()):
            typer.echo(path)


if __name__ == "__main__":
    run_typer(application)
