"""Runs what of the benchmark is asked for, and writes its rows and pictures."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from stowage.flows.benchmarks.slimfit.figure import accuracy_figure
from stowage.flows.benchmarks.slimfit.study import RATES, SEEDS, run_study
from stowage.flows.benchmarks.slimfit.summary import by_policy, differences, summarised
from stowage.stages.ir.files import write_atomically

FILE = "slimfit.json"


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


def keep(out: Path, sections: dict[str, list[dict[str, object]]]) -> None:
    """Write rows of some sections beside those that are there."""
    path = out / FILE
    found = json.loads(path.read_text()) if path.is_file() else {}
    write_atomically(path, json.dumps({**found, **sections}).encode())
