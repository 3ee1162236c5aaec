"""Measures how the size of clusters changes plans and planning time (thesis, figure 3.14).

The whole step is one block, planned by clusters of several sizes, on estimated costs. Clusters with more compute nodes,
forward and backward, than `GridSize.max_exact_nodes` are solved as H-Graphs of nodes, smaller ones exactly.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import polars as pl

from stowage.flows.benchmarks.markdown import markdown
from stowage.flows.benchmarks.papers.machines import MACHINES
from stowage.flows.benchmarks.remat.models import MODELS, build
from stowage.flows.benchmarks.remat.names import Size
from stowage.flows.benchmarks.remat.points import words
from stowage.flows.benchmarks.scaling.clusters_figure import clusters_figure
from stowage.flows.benchmarks.scaling.depth import EFFORT, MACHINE
from stowage.flows.planning.step import (
    QUICK,
    Costed,
    Costing,
    Effort,
    Planning,
    StepToPlan,
    cost_step,
    plan_costed,
    processor_s,
)
from stowage.stages.ir.activations import activation_share, device_budget, fixed_bytes
from stowage.stages.ir.errors import MIB, Infeasible, ParameterError
from stowage.stages.ir.files import write_atomically
from stowage.stages.ir.methods import method_of
from stowage.stages.ir.table import write_rows
from stowage.stages.partition import Limits
from stowage.stages.report.figures import render
from stowage.stages.report.frames import frame_of
from stowage.stages.settings.sizes import parse_percentage

DEFAULT_MODELS = ("transformer", "gpt2")
DEFAULT_METHODS = ("hiremate", "h_retention")

SIZES = (8, 12, 20, 30, 45)
"""Members of a cluster at most (M^l), by default."""

SHARES = (0.3, 0.5, 0.7)
METHODS = ("hiremate", "h_retention", "h_ilp")
"""Methods that solve the whole step by clusters. H-ILP takes minutes a plan, and finds none for large clusters."""

TOP = 1.5
"""Ratio of M^t to M^l, as in the defaults."""


@dataclass(frozen=True)
class ClusterSizeRow:
    """One row: the plan of a model by clusters of one size.

    Attributes:
        model: name of the model.
        method: method of planning.
        cluster_size: M^l, members of a cluster at most.
        top_size: M^t, members of the top at most.
        share: share of keep-all's activation budget that was asked for.
        calls: calls of the traced step.
        clusters: clusters of the step as recorded; 0 where it is too small for a partition.
        distinct: distinct clusters.
        levels: levels of the partition.
        budget_bytes: device budget.
        peak_bytes: predicted peak of the device; -1 without a plan.
        activation_share: share of keep-all's activation budget, at that peak.
        overhead: predicted time over the prediction for keeping everything, less 1; NaN without a plan.
        found_by: the planner that found the plan.
        options_s: processor time, child processes included, to partition and solve all clusters, once for all shares of
            a
            size and all methods with that formulation of clusters, from an empty store.
        options_wall_s: time by the clock of the same work.
        solve_s: processor time to plan from those options.
        solve_wall_s: time by the clock to plan from those options.
        note: why there is no plan.
    """

    model: str
    method: str
    cluster_size: int
    top_size: int
    share: float
    calls: int
    clusters: int
    distinct: int
    levels: int
    budget_bytes: int
    peak_bytes: int = -1
    activation_share: float = float("nan")
    overhead: float = float("nan")
    found_by: str = ""
    options_s: float = float("nan")
    options_wall_s: float = float("nan")
    solve_s: float = float("nan")
    solve_wall_s: float = float("nan")
    note: str = ""


@dataclass(frozen=True)
class ClusterSizeJob:
    """The plans to make.

    Attributes:
        models: names in `remat.models.MODELS`.
        methods: some of `METHODS`.
        sizes: M^l of each partition; M^t is `TOP` times that.
        shares: shares of keep-all's activation budget.
        size: size of the models.
        depth: depth of the models; None for their own.
        effort: effort of planning.
    """

    models: tuple[str, ...] = DEFAULT_MODELS
    methods: tuple[str, ...] = DEFAULT_METHODS
    sizes: tuple[int, ...] = SIZES
    shares: tuple[float, ...] = SHARES
    size: Size = "small"
    depth: int | None = None
    effort: Effort = EFFORT


def cluster_size_job(models: str, methods: str, sizes: str, shares: str, layers: str, *, quick: bool) -> ClusterSizeJob:
    """Make the job from a command line; empty for the defaults.

    Raises:
        ParameterError: a model or method is not known here, or something is no number.
    """
    if unknown := [name for name in words(models) if name not in MODELS]:
        raise ParameterError(f"--models names {', '.join(unknown)}: take some of {', '.join(MODELS)}.")
    if unknown := [name for name in words(methods) if name not in METHODS]:
        raise ParameterError(f"--methods names {', '.join(unknown)}: cluster-sizes takes {', '.join(METHODS)}.")
    if wrong := [text for text in words(sizes) if not text.isdecimal() or int(text) < 2]:
        raise ParameterError(f"--sizes names {', '.join(wrong)}: give whole numbers above 1.")
    if layers and (not layers.isdecimal() or not int(layers)):
        raise ParameterError(f"--layers is {layers}: cluster-sizes takes one whole number above 0.")
    return ClusterSizeJob(
        models=words(models) or DEFAULT_MODELS,
        methods=words(methods) or DEFAULT_METHODS,
        sizes=tuple(sorted({int(text) for text in words(sizes)})) or SIZES,
        shares=tuple(parse_percentage(f"{s.removesuffix('%')}%", "--shares") for s in words(shares)) or SHARES,
        depth=int(layers) if layers else None,
        effort=QUICK if quick else EFFORT,
    )


def cluster_size_rows(job: ClusterSizeJob, say: Callable[[str], None] = lambda text: None) -> Iterator[ClusterSizeRow]:
    """Plan every combination: model by model, small clusters first."""
    for model in job.models:
        case = build(model, job.size, job.depth)
        with tempfile.TemporaryDirectory() as stores:
            how = Costing(stores=Path(stores), effort=job.effort, costs="roofline", target=MACHINES[MACHINE].device)
            costed = cost_step(StepToPlan(model=case.model, batch=case.batch, loss=case.loss), how)
        for size in job.sizes:
            for row in _size_rows(job, model, replace(costed, limits=limits_of(size))):
                say(describe(row))
                yield row


def limits_of(size: int) -> Limits:
    """Return the limits M^l and M^t."""
    return Limits(top_size=round(TOP * size), size=size)


def _size_rows(job: ClusterSizeJob, model: str, costed: Costed) -> Iterator[ClusterSizeRow]:
    limits = costed.limits
    assert limits is not None
    trace = costed.variants[0].trace
    fixed, whole = fixed_bytes(trace), costed.eager_peak_bytes
    gc.collect()
    with tempfile.TemporaryDirectory() as empty:
        stores, spent = Path(empty), dict[str, tuple[float, float]]()
        for method in job.methods:
            formulation = method_of(method).clusters or job.effort.grid.cluster_formulation
            if formulation not in spent:
                started = _clocks()
                costed.options_for(method, stores, job.effort)
                spent[formulation] = _since(started)
            options_s, options_wall_s = spent[formulation]
            clusters = costed.variants_for(method)[0].clusters
            for share in job.shares:
                budget = device_budget(fixed, whole, share)
                row = ClusterSizeRow(
                    model=model,
                    method=method,
                    cluster_size=limits.size,
                    top_size=limits.top_size,
                    share=share,
                    calls=len(trace.calls),
                    clusters=len(clusters),
                    distinct=len({c.cluster_hash for c in clusters}),
                    levels=max((c.level for c in clusters), default=0),
                    budget_bytes=budget,
                    options_s=options_s,
                    options_wall_s=options_wall_s,
                )
                started = _clocks()
                found: dict[str, Any]
                try:
                    how = Planning(stores=stores, effort=job.effort, method=method)
                    s = plan_costed(costed, budget, how).summary
                    found = {
                        "peak_bytes": s.device_peak_bytes,
                        "activation_share": activation_share(fixed, whole, s.device_peak_bytes),
                        "overhead": s.step_time_s / s.keep_all_time_s - 1,
                        "found_by": s.method,
                    }
                except Infeasible as infeasible:
                    found = {"note": f"the smallest feasible is {infeasible.smallest_feasible_bytes / MIB:,.1f} MiB"}
                solve_s, solve_wall_s = _since(started)
                yield replace(row, solve_s=solve_s, solve_wall_s=solve_wall_s, **found)


def _clocks() -> tuple[float, float]:
    return processor_s(), time.perf_counter()


def _since(started: tuple[float, float]) -> tuple[float, float]:
    now = _clocks()
    return now[0] - started[0], now[1] - started[1]


def describe(row: ClusterSizeRow) -> str:
    """Describe a row in one line for people."""
    found = row.note or f"overhead {row.overhead:+.1%}"
    return (
        f"{row.model}, {row.method}, clusters of {row.cluster_size} ({row.clusters}, {row.distinct} distinct, "
        f"{row.levels} levels), {row.share:.0%}: {found}; clusters {row.options_s:.1f} s of processor time "
        f"({row.options_wall_s:.1f} s), plan {row.solve_s:.1f} s ({row.solve_wall_s:.1f} s)"
    )


def markdown_of(rows: Sequence[ClusterSizeRow]) -> str:
    """Return a Markdown table, a line for each model, method and size."""
    shares = sorted({r.share for r in rows})
    at = {share: f"overhead at {share:.0%}" for share in shares}
    formats: dict[str, Callable[[Any], str]] = {
        "M^l, M^t": lambda x: f"{x['cluster_size']}, {x['top_size']}",
        "clusters (distinct)": lambda x: f"{x['clusters']} ({x['distinct']})",
        "levels": str,
        "clusters solved in": _seconds,
        "each plan in": _seconds,
    }
    table = markdown(
        by_size(rows).select(
            "model",
            "method",
            pl.struct("cluster_size", "top_size").alias("M^l, M^t"),
            pl.struct("clusters", "distinct").alias("clusters (distinct)"),
            "levels",
            *(_at(share).alias(name) for share, name in at.items()),
            pl.struct(s="options_s", clock="options_wall_s").alias("clusters solved in"),
            pl.struct(s="solve_s", clock="solve_wall_s").alias("each plan in"),
        ),
        formats={**formats, **dict.fromkeys(at.values(), _overhead)},
    )
    return f"{table}\n\nTimes are of the processor (by the clock)."


def _overhead(x: Mapping[str, Any]) -> str:
    return "–" if x["note"] else f"{x['overhead']:+.1%}"


def _seconds(x: Mapping[str, float]) -> str:
    return f"{x['s']:.1f} s ({x['clock']:.1f} s)"


def _at(share: float) -> pl.Expr:
    """Select, among the points of a size, the one at a share; null where there is none."""
    at = pl.element().struct.field("share") == share
    return pl.col("points").list.eval(pl.element().filter(at)).list.first()


def by_size(rows: Sequence[ClusterSizeRow]) -> pl.DataFrame:
    """Return a line for each model, method and M^l: its first row, mean times of planning, and all its `points`."""
    means = ("solve_s", "solve_wall_s")
    points = pl.struct("share", "overhead", "note").alias("points")
    key = ["model", "method", "cluster_size"]
    return (
        frame_of(ClusterSizeRow, rows)
        .group_by(key, maintain_order=True)
        .agg(points, pl.col(means).mean(), pl.exclude(*key, *means).first())
    )


def picture(rows: Sequence[ClusterSizeRow]) -> bytes:
    """Draw overhead and planning time against the size of clusters, a column for each model, as PNG."""
    overheads: dict[str, dict[tuple[str, str], list[tuple[int, float]]]] = {}
    seconds: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for r in rows:
        if not r.note:
            line = overheads.setdefault(r.model, {}).setdefault((r.method, f"{r.share:.0%}"), [])
            line.append((r.cluster_size, 100 * r.overhead))
    total = (pl.col("options_s") + pl.col("solve_s")).alias("total")
    for model, method, size, taken in by_size(rows).select("model", "method", "cluster_size", total).iter_rows():
        seconds.setdefault(model, {}).setdefault(method, []).append((size, taken))
    return render(lambda: clusters_figure(overheads, seconds))[1]


def run_cluster_sizes(job: ClusterSizeJob, folder: Path, say: Callable[[str], None]) -> str:
    """Plan, write `cluster_sizes.parquet`, `.md` and `.png` into `folder`, and return the table."""
    rows: list[ClusterSizeRow] = []
    for row in cluster_size_rows(job, say):
        rows.append(row)
        write_rows(folder / "cluster_sizes.parquet", ClusterSizeRow, rows)
    write_atomically(folder / "cluster_sizes.png", picture(rows))
    table = markdown_of(rows)
    write_atomically(folder / "cluster_sizes.md", (table + "\n").encode())
    return table
