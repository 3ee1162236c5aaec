"""Turns what ranks found into rows, and measures the model of the documents on two ranks of a CPU."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from stowage.flows.benchmarks.gpu.ranks.page import PAGE
from stowage.flows.benchmarks.gpu.ranks.spread import spread_of_rounds
from stowage.flows.benchmarks.gpu.ranks.whole import RanksEffort, job_of_ranks, run_ranks, steps_of_ranks
from stowage.flows.benchmarks.gpu.steps import CommandStep, StepResult
from stowage.stages.ir.errors import ParameterError
from stowage.stages.ir.files import write_atomically

FILE = "several_gpus.json"
"""The rows, in the folder of results."""

RANKS = 2
MODEL = "gpt2"
"""The model of the documents."""

SHAPES: dict[str, dict[str, Any]] = {
    MODEL: {"n_layer": 6, "n_embd": 384, "n_head": 6, "vocab_size": 2000},
    "t5": {"d_model": 256, "d_kv": 64, "d_ff": 1024, "num_layers": 4, "num_heads": 4, "vocab_size": 2000},
}
BATCH, LENGTH, STEPS, ROUNDS = 4, 128, 7, 3
LIMIT_S = 5400.0


def run_two_ranks(
    out: Path, say: Callable[[str], None], model: str = MODEL, steps: int = STEPS, rounds: int = ROUNDS
) -> str:
    """Measure plans of two ranks beside DistributedDataParallel and FSDP2, anew, and return the page.

    Args:
        out: folder of results.
        say: receives what people should know.
        model: one of `SHAPES`; rows are kept of the documents' alone.
        steps: timed iterations of each contestant in a round.
        rounds: how often each of them is timed, in turn with the others.

    Raises:
        ParameterError: there is no such model, or a contestant did not run to its end.
    """
    if model not in SHAPES:
        raise ParameterError(f"There is no shape of {model!r}: there are {', '.join(SHAPES)}.")
    folder = out / ("ranks" if model == MODEL else f"ranks_{model}")
    job = job_of_ranks("cpu", SHAPES[model], BATCH, LENGTH, model=model)
    effort = RanksEffort(steps, rounds, quick=True)
    results = run_ranks(folder, job, RANKS, say, effort=effort, budget_s=LIMIT_S, again=["all"])
    rows = rows_of(steps_of_ranks(job, RANKS, folder, effort), results)
    if model == MODEL:
        write_atomically(out / FILE, json.dumps(rows).encode())
    return (folder / PAGE).read_text(encoding="utf-8")


def check_written(model: str, *, written: bool) -> None:
    """Refuse to write the page of another model.

    Raises:
        ParameterError: another model's numbers would be written.
    """
    if written and model != MODEL:
        raise ParameterError(f"--write is for {MODEL}, of which the page is: leave out --write, or --model {model}.")


def rows_of(steps: Sequence[CommandStep], results: Mapping[str, StepResult]) -> list[dict[str, Any]]:
    """Return a row for each contestant: budget and peak in bytes, seconds a step, and whether it equals DDP.

    Raises:
        ParameterError: one of them did not run to its end.
    """
    asked = [s for s in steps if s.asked.get("kind") == "ranks-train" and "again" not in s.asked]
    for name in (*(step.name for step in asked), "compare"):
        result = results.get(name)
        if result is None or result.status != "held":
            why = (result.why or result.status) if result is not None else "it was not run"
            raise ParameterError(f"{name!r} gave no numbers for the page of several GPUs: {why}")
    compared = results["compare"].numbers
    return [_row(step, steps, results, compared) for step in asked]


def _row(
    step: CommandStep,
    steps: Sequence[CommandStep],
    results: Mapping[str, StepResult],
    compared: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    numbers = results[step.name].numbers
    row = {
        "contestant": step.about,
        "budget_bytes": numbers.get("budget_bytes"),
        "predicted_bytes": numbers.get("predicted_bytes", numbers.get("needed_bytes")),
    }
    if "refused" in numbers:
        return {**row, "equal": "nothing fits"}
    took = spread_of_rounds(step, steps, results)
    return {
        **row,
        "peak_bytes": numbers["peak_bytes"],
        "step_s": took.median_s,
        "low_s": took.low_s,
        "high_s": took.high_s,
        "equal": "" if step.name == "ddp" else "equal" if compared[step.name]["equal"] else "not equal",
    }
