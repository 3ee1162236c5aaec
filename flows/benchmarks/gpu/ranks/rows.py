"""Turns what ranks found into rows, and measures the model of the documents on two ranks of a CPU."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from stowage.flows.benchmarks.gpu.ranks.page import PAGE
from stowage.flows.benchmarks.gpu.ranks.whole import job_of_ranks, run_ranks, steps_of_ranks
from stowage.flows.benchmarks.gpu.steps import CommandStep, StepResult
from stowage.stages.ir.errors import ParameterError
from stowage.stages.ir.files import write_atomically

FILE = "several_gpus.json"
"""The rows, in the folder of results."""

RANKS = 2
MODEL = {"n_layer": 6, "n_embd": 384, "n_head": 6, "vocab_size": 2000}
BATCH, LENGTH, STEPS = 4, 128, 7
LIMIT_S = 1800.0


def run_two_ranks(out: Path, say: Callable[[str], None]) -> str:
    """Measure plans of two ranks beside DistributedDataParallel and FSDP2, anew, and return the page.

    Args:
        out: folder of results.
        say: receives what people should know.

    Raises:
        ParameterError: a contestant did not run to its end.
    """
    folder = out / "ranks"
    job = job_of_ranks("cpu", MODEL, BATCH, LENGTH)
    results = run_ranks(folder, job, RANKS, say, steps=STEPS, quick=True, budget_s=LIMIT_S, again=["all"])
    rows = rows_of(steps_of_ranks(job, RANKS, folder, STEPS, True), results)
    write_atomically(out / FILE, json.dumps(rows).encode())
    return (folder / PAGE).read_text(encoding="utf-8")


def rows_of(steps: Sequence[CommandStep], results: Mapping[str, StepResult]) -> list[dict[str, Any]]:
    """Return a row for each contestant: budget and peak in bytes, seconds a step, and whether it equals DDP.

    Raises:
        ParameterError: one of them did not run to its end.
    """
    asked = [step for step in steps if step.asked.get("kind") == "ranks-train"]
    for name in (*(step.name for step in asked), "compare"):
        result = results.get(name)
        if result is None or result.status != "held":
            why = (result.why or result.status) if result is not None else "it was not run"
            raise ParameterError(f"{name!r} gave no numbers for the page of several GPUs: {why}")
    compared = results["compare"].numbers
    return [
        {
            "contestant": step.about,
            "budget_bytes": results[step.name].numbers.get("budget_bytes"),
            "predicted_bytes": results[step.name].numbers.get("predicted_bytes"),
            "peak_bytes": results[step.name].numbers["peak_bytes"],
            "step_s": results[step.name].numbers["step_s"],
            "equal": "" if step.name == "ddp" else "equal" if compared[step.name]["equal"] else "not equal",
        }
        for step in asked
    ]
