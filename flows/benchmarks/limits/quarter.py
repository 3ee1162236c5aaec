"""Proves that a plan's bytes are true: trains in a quarter of the memory in which plain PyTorch survives.

The kernel is the judge.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from stowage.flows.benchmarks.limits.cgroup import LimitedRun, run_limited, smallest_surviving_limit
from stowage.flows.benchmarks.limits.limited import build
from stowage.flows.pipeline.project import find_root, stage_environment
from stowage.stages.ir.errors import MIB, StowageError, size_text
from stowage.stages.ir.files import write_atomically

PROCESS_BYTES = 640 * MIB
"""Bytes that a process takes besides the device tier: Python, torch, transformers, the plan, and the heap's remains."""

SPIN = {"GOMP_SPINCOUNT": "1000"}
"""Environment of the plan's process: OpenMP's threads soon yield their cores to copies, instead of spinning."""

RESOLUTION = 1 / 32
"""Resolution of the bisection, as a share of the largest limit expected."""


@dataclass(frozen=True)
class Quarter:
    """The result of the proof.

    Attributes:
        parameters: number of the model's parameters.
        eager_limit_bytes: the smallest limit under which plain PyTorch survived.
        eager_killed_bytes: the largest under which it was killed.
        limit_bytes: limit of the plan's process, a quarter.
        device_budget_bytes: budget of the plan.
        device_peak_bytes: predicted peak of the plan.
        peak_bytes: highest memory that the kernel charged to the plan's process.
        losses: the plan's losses of each step.
        eager_losses: plain PyTorch's losses of each step.
        step_s: the plan's median wall time without the first step.
        eager_step_s: plain PyTorch's median wall time without the first step.
        predicted_s: step time that the plan predicts.
        rates_bound_s: step time that computing and the measured rates of the disk allow.
        method: method of the plan.
    """

    parameters: int
    eager_limit_bytes: int
    eager_killed_bytes: int
    limit_bytes: int
    device_budget_bytes: int
    device_peak_bytes: int
    peak_bytes: int
    losses: tuple[float, ...]
    eager_losses: tuple[float, ...]
    step_s: float
    eager_step_s: float
    predicted_s: float
    rates_bound_s: float
    method: str


def train_in_a_quarter(
    scratch: Path,
    *,
    layers: int = 18,
    width: int = 1024,
    batch: int = 1,
    length: int = 256,
    steps: int = 3,
    root: Path | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Quarter:
    """Find what plain PyTorch needs by bisection, then train under a plan in a quarter of it.

    Args:
        scratch: a folder on the disk that is the lower tier: weights, stores and offloaded tensors.
        layers: layers of a GPT-2 over bytes.
        width: its width.
        batch: samples of a batch.
        length: bytes of a sample.
        steps: steps of each run; AdamW has its states from the second on.
        root: folder of the project.
        say: receives progress.

    Raises:
        StowageError: no limit can be set on this machine, or a process failed for another reason than memory.
    """
    weights = scratch / "weights.safetensors"
    model = build(layers, width, length)
    generator = torch.Generator().manual_seed(0)
    save_file({n: 0.02 * torch.randn(p.shape, generator=generator) for n, p in model.named_parameters()}, str(weights))
    parameters = sum(p.numel() for p in model.parameters())
    shape = {"layers": layers, "width": width, "batch": batch, "length": length, "weights": str(weights)}
    shape |= {"store": str(scratch / "store"), "offload_dir": str(scratch / "offload")}
    environment = stage_environment(find_root(root))

    def command(budget: int | None, count: int) -> list[str]:
        request = json.dumps(shape | {"budget": budget, "steps": count})
        return [sys.executable, "-m", "stowage.flows.benchmarks.limits.limited", request]

    def eager(limit: int) -> LimitedRun:
        run = run_limited(command(None, steps), limit, environment=environment, timeout_s=900)
        say(f"plain PyTorch in {size_text(limit)}: {'survives' if run.survived else 'killed'}")
        return run

    whole = 16 * parameters + (2 << 30)
    found = smallest_surviving_limit(eager, 16 * parameters, 2 * whole, int(RESOLUTION * whole))
    limit = found.limit_bytes // 4
    budget = limit - PROCESS_BYTES
    say(f"planning for {size_text(budget)}")
    planning = subprocess.run(command(budget, 0), env=environment, capture_output=True, text=True, check=False)
    if planning.returncode:
        raise StowageError(f"Planning failed: {(planning.stderr.strip().splitlines() or ['no message'])[-1]}")
    run = run_limited(command(budget, steps), limit, environment=environment | SPIN, timeout_s=1800)
    if not run.survived:
        last = (run.output.strip().splitlines() or ["no message"])[-1]
        why = f"was killed at {size_text(run.peak_bytes)}, after: {last}" if run.killed else last
        raise StowageError(f"The plan's process in {size_text(limit)}: {why}")
    about, *records = _answers(run)
    eager_records = _answers(next(r for r in reversed(found.runs) if r.survived))
    return Quarter(
        parameters=parameters,
        eager_limit_bytes=found.limit_bytes,
        eager_killed_bytes=found.killed_bytes,
        limit_bytes=limit,
        device_budget_bytes=budget,
        device_peak_bytes=about["device_peak_bytes"],
        peak_bytes=run.peak_bytes,
        losses=tuple(r["loss"] for r in records),
        eager_losses=tuple(r["loss"] for r in eager_records),
        step_s=statistics.median(r["time_s"] for r in records[1:]),
        eager_step_s=statistics.median(r["time_s"] for r in eager_records[1:]),
        predicted_s=about["step_time_s"],
        rates_bound_s=about["rates_bound_s"],
        method=about["method"],
    )


def _answers(run: LimitedRun) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.output.splitlines() if line.startswith("{")]


def run_quarter(say: Callable[[str], None], root: Path | None = None) -> str:
    """Run the proof in a temporary folder, write `artifacts/benchmark/quarter.json`, and return one sentence."""
    folder = find_root(root)
    store = folder / ".stowage"
    store.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=store) as scratch:
        found = train_in_a_quarter(Path(scratch), root=folder, say=say)
    text = json.dumps(asdict(found), indent=2) + "\n"
    write_atomically(folder / "artifacts" / "benchmark" / "quarter.json", text.encode())
    equal = "the same losses" if found.losses == found.eager_losses else "OTHER LOSSES"
    ratio = found.step_s / found.eager_step_s
    return (
        f"A GPT-2 of {found.parameters / 1e6:.0f} M parameters with AdamW: plain PyTorch survives under a limit of "
        f"{size_text(found.eager_limit_bytes)} and is killed under {size_text(found.eager_killed_bytes)}; under a "
        f"quarter, {size_text(found.limit_bytes)}, the plan trains to {equal}, in a process that peaks at "
        f"{size_text(found.peak_bytes)} with a device budget of {size_text(found.device_budget_bytes)}, at {ratio:.2f} "
        "× plain PyTorch's step time: "
        f"{found.step_s:.2f} s measured, {found.predicted_s:.2f} s predicted, {found.rates_bound_s:.2f} s the bound "
        "that computing and the disk's rates imply."
    )
