"""Runs one contestant on all ranks, and compares what contestants have trained."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from stowage.flows.benchmarks.gpu.first.exact import ExactRun, difference
from stowage.flows.benchmarks.gpu.ranks.contestant import REQUEST
from stowage.flows.benchmarks.gpu.steps import StepAnswer
from stowage.stages.device.rates.collectives import measure_ranks
from stowage.stages.ir.amounts import size_text, time_text
from stowage.stages.ir.files import write_atomically
from stowage.stages.runtime.files.tensor_file import TensorFile
from stowage.stages.train.launch import launch

ROUNDING = 1e-3
"""Largest difference that adding the gradients of more than two ranks in another order may cause."""


def rates(asked: Mapping[str, Any]) -> StepAnswer:
    """Measure what gathers take among the ranks."""
    found = measure_ranks(asked["device"], asked["ranks"])
    numbers = {"bytes_per_s": found.bytes_per_s, "start_s": found.start_s}
    return StepAnswer("held", numbers=numbers, lines=(f"{found.bytes_per_s / 1e9:.2f} GB/s into each rank",))


def train(asked: Mapping[str, Any]) -> StepAnswer:
    """Train as one contestant on all ranks."""
    folder, name = Path(asked["folder"]).absolute(), asked["name"]
    folder.mkdir(parents=True, exist_ok=True)
    found_at, weights_at = folder / f"{name}.json", folder / f"{name}.safetensors"
    request = {**asked, "found": str(found_at), "stores": str(folder / "stores")}
    if not asked.get("again"):  # what it trains is compared once
        request["weights"] = str(weights_at)
        weights_at.unlink(missing_ok=True)
    if "budget_of" in asked:
        reference = json.loads((folder / f"{asked['budget_of']}.json").read_text())
        request["budget_bytes"] = int(asked["fraction"] * reference["peak_bytes"])
    request_at = folder / f"{name}.request"
    write_atomically(request_at, json.dumps(request).encode())
    threads = max(1, torch.get_num_threads() // asked["ranks"])  # the ranks of one CPU share its cores
    given = {REQUEST: str(request_at), "OMP_NUM_THREADS": str(threads)}
    launch("stowage.flows.benchmarks.gpu.ranks.contestant", asked["ranks"], given)
    numbers = json.loads(found_at.read_text())
    if "budget_bytes" in request:
        numbers["budget_bytes"] = request["budget_bytes"]
    if "refused" in numbers:
        return StepAnswer("held", numbers=numbers, lines=(numbers["refused"],))
    lines = [f"peak {size_text(numbers['peak_bytes'])} a rank, {time_text(numbers['step_s'])} a step"]
    lines += [numbers["about"]] * bool(numbers["about"])
    return StepAnswer("held", numbers=numbers, lines=tuple(lines))


def compare(asked: Mapping[str, Any]) -> StepAnswer:
    """Compare losses of all ranks and whole weights with DistributedDataParallel's."""
    folder = Path(asked["folder"])
    expected = _run_of(folder, "ddp")
    numbers, lines, fallen = {}, [], []
    for name in asked["names"]:
        if not (folder / f"{name}.json").is_file() or not (folder / f"{name}.safetensors").is_file():
            continue  # it has fallen, or nothing fits its budget
        found = difference(_run_of(folder, name), expected)
        numbers[name] = {"equal": found.equal, "loss": found.loss, "weight": found.weight}
        lines.append(f"{name}: {found}")
        near = found.loss <= ROUNDING and found.weight <= ROUNDING
        if name.startswith("planned") and not (found.equal if asked["ranks"] <= 2 else near):
            fallen.append(name)
    why = f"{', '.join(fallen)} trains other numbers than DistributedDataParallel" if fallen else ""
    return StepAnswer("fell" if fallen else "held", why, numbers, tuple(lines))


def _run_of(folder: Path, name: str) -> ExactRun:
    found = json.loads((folder / f"{name}.json").read_text())
    file = TensorFile(folder / f"{name}.safetensors", hint="run the step again")
    weights: dict[str, torch.Tensor] = {key: file.get(key) for key in file.forms}
    return ExactRun([loss for rank in found["losses"] for loss in rank], weights, found["step_s"])
