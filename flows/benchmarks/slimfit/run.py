"""Runs what of the benchmark is asked for, and writes its rows and pictures."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from stowage.flows.benchmarks.slimfit.figure import accuracy_figure
from stowage.flows.benchmarks.slimfit.lossy_plans import CASES, LossyRow, compare_lossy
from stowage.flows.benchmarks.slimfit.models import MODELS
from stowage.flows.benchmarks.slimfit.saved import saved_activations
from stowage.flows.benchmarks.slimfit.study import RATES, SEEDS, run_study
from stowage.flows.benchmarks.slimfit.summary import by_policy, differences, summarised
from stowage.stages.ir.errors import ParameterError
from stowage.stages.ir.files import write_atomically
from stowage.stages.ir.lossy import Lossy

FILE = "slimfit.json"


PARTS = ("accuracy", "saved", "lossy")


def run_parts(out: Path, say: Callable[[str], None], parts: str = "", names: str = "", seeds: int = SEEDS) -> str:
    """Run parts of the benchmark.

    Args:
        out: folder of results.
        say: receives what people should know.
        parts: some of `PARTS`, with commas; by default all.
        names: tasks or models of these parts, with commas; by default all.
        seeds: how many seeds of each task.

    Raises:
        ParameterError: there is no such part.
    """
    wanted = [part for part in parts.split(",") if part] or list(PARTS)
    chosen = [name for name in names.split(",") if name]
    for part in wanted:
        if part not in PARTS:
            raise ParameterError(f"There is no part {part!r} of this benchmark: write some of {', '.join(PARTS)}.")
    run = {
        "accuracy": lambda: run_accuracy(out, say, chosen, seeds=seeds),
        "saved": lambda: run_saved(out, say, chosen),
        "lossy": lambda: run_lossy(out, say, chosen),
    }
    return "\n".join(run[part]() for part in wanted)


def run_accuracy(
    out: Path,
    say: Callable[[str], None],
    tasks: Sequence[str] = (),
    policies: Sequence[str] = (),
    rates: Sequence[float] = RATES,
    seeds: int = SEEDS,
) -> str:
    """Train all tasks under all policies; what an earlier run has finished is not repeated.

    Args:
        out: folder of results.
        say: receives what people should know.
        tasks: see `run_study`.
        policies: see `run_study`.
        rates: see `run_study`.
        seeds: see `run_study`.

    Returns:
        a summary for people.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the models are too small for more
    try:
        rows = run_study(out / "slimfit", say, tasks, policies, rates, seeds)
    finally:
        torch.set_num_threads(threads)
    summary = summarised(rows)
    keep(out, {"slimfit_accuracy": by_policy(summary), "slimfit_differences": differences(rows)})
    accuracy_figure(summary).savefig(out / "slimfit_accuracy.png", dpi=110)
    return "\n".join(
        f"{r['policy']}, {r['rate']:.0%} frozen: {r['difference']:+.2f} ± {r['error']:.2f}" for r in differences(rows)
    )


def run_saved(out: Path, say: Callable[[str], None], names: Sequence[str] = ()) -> str:
    """Measure what forward saves against the freezing rate; rows of other models stay.

    Args:
        out: folder of results.
        say: receives what people should know.
        names: models, of `MODELS`; by default all.
    """
    rows = _rows(out, "slimfit_saved")
    for name in names or tuple(MODELS):
        model = MODELS[name]
        found = [{**asdict(row), "batch": model.batch} for row in saved_activations(model)]
        rows = [row for row in rows if row["model"] != model.label] + found
        keep(out, {"slimfit_saved": rows})
        say(f"{model.label}: done")
    return f"{len(rows)} rows"


def run_lossy(out: Path, say: Callable[[str], None], names: Sequence[str] = ()) -> str:
    """Compare plans with and without leave; rows of other models stay.

    Args:
        out: folder of results.
        say: receives what people should know.
        names: models, of `CASES`; by default all.
    """
    rows = _rows(out, "slimfit_lossy")
    for name in names or tuple(CASES):
        found = [_lossy_row(row) for row in compare_lossy(name, Lossy(), out / "slimfit" / "stores")]
        rows = [row for row in rows if row["model"] != name] + found
        keep(out, {"slimfit_lossy": rows})
        say(f"{name}: done")
    return f"{len(rows)} rows"


def _lossy_row(row: LossyRow) -> dict[str, Any]:
    known = {
        "model": row.model,
        "share": row.share,
        "leave": "with leave" if row.lossy else "exact",
        "kept": ", ".join(row.kept),
    }
    if not row.feasible:
        return {**known, "leave": f"{known['leave']}: none fits"}
    numbers = ("predicted_peak_bytes", "peak_bytes", "predicted_time_s", "time_s")
    known |= {key: getattr(row, key) for key in numbers}
    return known | ({"predicted_error": row.predicted_error, "error": row.error} if row.lossy else {})


def _rows(out: Path, section: str) -> list[dict[str, Any]]:
    path = out / FILE
    found: list[dict[str, Any]] = json.loads(path.read_text()).get(section, []) if path.is_file() else []
    return found


def keep(out: Path, sections: dict[str, list[dict[str, Any]]]) -> None:
    """Write rows of some sections beside those that are there."""
    path = out / FILE
    found = json.loads(path.read_text()) if path.is_file() else {}
    write_atomically(path, json.dumps({**found, **sections}).encode())
