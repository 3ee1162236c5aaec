"""Turns what a benchmark has written into the data of the pages, and writes the pages again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from stowage.flows.benchmarks.pages.formats import mib, seconds
from stowage.flows.benchmarks.pages.measurement import measured_now, write_measurement
from stowage.flows.benchmarks.pages.remat_cells import remat_sections
from stowage.flows.benchmarks.pages.write import sections_by_name, write_pages

Rows = Sequence[Mapping[str, Any]]


def publish(benchmark: str, results: Path, pages: Path, command: str) -> list[Path]:
    """Turn what a benchmark wrote into data of the pages, and write the pages.

    Args:
        benchmark: which one, as in `READERS`.
        results: the folder that it wrote into.
        pages: the folder of the pages, `docs/measured`.
        command: how it was called.

    Returns:
        the pages that were written.
    """
    known = sections_by_name()
    for name, rows in READERS[benchmark](results).items():
        write_measurement(pages, measured_now(name, command, rows))
        picture = results / known[name].picture
        if known[name].picture and picture.is_file():
            (pages.parent / "images").mkdir(exist_ok=True)
            shutil.copyfile(picture, pages.parent / "images" / picture.name)
    return write_pages(pages)


def _json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _main_job(results: Path) -> dict[str, Rows]:
    frame = pl.DataFrame(_json(results / "main.json"), infer_schema_length=None)
    planned = pl.col("budget_bytes") >= 0
    columns = ("budget_bytes", "plan_s", "recomputed_fraction", "predicted_peak_bytes", "predicted_time_s")
    return {"main_job": frame.with_columns(pl.when(planned).then(pl.col(c)).alias(c) for c in columns).to_dicts()}


def _first_minute(results: Path) -> dict[str, Rows]:
    return {"first_minute": _json(results / "first_minute.json")}


def _big(results: Path) -> dict[str, Rows]:
    frame = pl.DataFrame(_json(results / "big.json"), infer_schema_length=None)
    return {"big": frame.select("label", seconds="total_s", peak_bytes="process_bytes").to_dicts()}


def _growth(results: Path) -> dict[str, Rows]:
    frame = pl.read_parquet(results / "growth.parquet").filter(pl.col("stage") == "total")
    case = pl.format("{}, {}", "model", "method").alias("case")
    return {"growth": frame.select(case, "layers", "seconds").to_dicts()}


def _partition(results: Path) -> dict[str, Rows]:
    frame = pl.read_parquet(results / "partition.parquet").group_by("nodes", maintain_order=True)
    spread = (pl.col("seconds").min().alias("least_s"), pl.col("seconds").max().alias("most_s"))
    return {"partition": frame.agg(*spread).to_dicts()}


def _depth(results: Path) -> dict[str, Rows]:
    frame = pl.read_parquet(results / "remat_depth.parquet").filter(pl.col("stage") == "total")
    case = pl.format("{}, {} layers", "model", "layers").alias("case")
    clock = pl.lit("processor").alias("clock")
    return {"remat_depth": frame.select(case, pl.col("method").alias("how"), "seconds", clock).to_dicts()}


def _cluster_sizes(results: Path) -> dict[str, Rows]:
    frame = pl.read_parquet(results / "cluster_sizes.parquet")
    method = pl.format("{}, {} at {}%", "model", "method", (pl.col("share") * 100).round().cast(pl.Int64))
    return {"cluster_sizes": frame.select(method.alias("method"), "overhead", size="cluster_size").to_dicts()}


def _quarter(results: Path) -> dict[str, Rows]:
    q = _json(results / "quarter.json")
    ratio = q["step_s"] / q["eager_step_s"]
    lines = (
        ("limit under which it survives", mib(q["eager_limit_bytes"]), mib(q["limit_bytes"])),
        ("limit under which it is killed", mib(q["eager_killed_bytes"]), None),
        ("peak of the process, by the kernel", None, mib(q["peak_bytes"])),
        ("of it, the plan's peak", None, mib(q["device_peak_bytes"])),
        ("step time, measured", seconds(q["eager_step_s"]), f"{seconds(q['step_s'])}, {ratio:.2f} × plain"),
        ("step time, predicted", None, seconds(q["predicted_s"])),
        ("what computing and the disk's rates allow", None, seconds(q["rates_bound_s"])),
        ("losses", "", "the same" if q["losses"] == q["eager_losses"] else "**others**"),
    )
    return {"quarter": [dict(zip(("what", "plain", "plan"), line, strict=True)) for line in lines]}


def _papers(results: Path) -> dict[str, Rows]:
    return {"papers": pl.read_parquet(results / "papers.parquet").to_dicts()}


def _exact(results: Path) -> dict[str, Rows]:
    return {"exact": _json(results / "exact.json")}


def _host(results: Path) -> dict[str, Rows]:
    return {"host": pl.read_parquet(results / "host.parquet").to_dicts()}


def _elixir(results: Path) -> dict[str, Rows]:
    found: dict[str, Rows] = _json(results / "elixir.json")
    return found


def _elixir_plans(results: Path) -> dict[str, Rows]:
    found: dict[str, Rows] = _json(results / "elixir_plans.json")
    return found


def _slimfit(results: Path) -> dict[str, Rows]:
    from stowage.flows.benchmarks.slimfit.run import FILE as SLIMFIT  # needs torch
    from stowage.flows.benchmarks.slimfit.run import measured_sections

    found: dict[str, Rows] = _json(results / SLIMFIT)
    return {name: found[name] for name in measured_sections(results)}


def _several_gpus(results: Path) -> dict[str, Rows]:
    return {"several_gpus": _json(results / "several_gpus.json")}


def _proven(results: Path) -> dict[str, Rows]:
    from stowage.flows.benchmarks.proven.pages import sections_of
    from stowage.flows.benchmarks.proven.run import kept_cells, kept_eviction, kept_planning  # needs torch

    sections = sections_of(kept_cells(results), kept_planning(results), kept_eviction(results))
    return {name: rows for name, rows in sections.items() if rows}


READERS: dict[str, Callable[[Path], dict[str, Rows]]] = {
    "main_job": _main_job,
    "first_minute": _first_minute,
    "big": _big,
    "growth": _growth,
    "partition": _partition,
    "remat_depth": _depth,
    "cluster_sizes": _cluster_sizes,
    "quarter": _quarter,
    "papers": _papers,
    "exact": _exact,
    "host": _host,
    "remat": remat_sections,
    "elixir": _elixir,
    "slimfit": _slimfit,
    "elixir_plans": _elixir_plans,
    "several_gpus": _several_gpus,
    "proven": _proven,
}
"""Benchmark -> the function that reads its results: section -> rows."""
