"""Runs the checks of the first ten minutes on a card in order, cheapest first."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stowage.flows.benchmarks.gpu.first.page import PAGE, page_of
from stowage.flows.benchmarks.gpu.first.tests import TESTS
from stowage.flows.benchmarks.gpu.job import GpuJob
from stowage.flows.benchmarks.gpu.steps import CommandStep, Runner, StepResult
from stowage.stages.ir.files import write_atomically

BUDGET_S = 600.0
"""Seconds of one call, by default."""

FRACTIONS = (0.95, 0.85)
"""Fractions of the memory limit to plan for."""

TESTS_OF_TIERS = ["test_machine.py", "test_pinned_on_gpu.py", "test_host_and_disk_on_gpu.py"]
TESTS_OF_TRAINING = ["test_training.py"]
CARRIED = "carried"
"""Name of the folder with what is carried to a machine that plans, and back."""

GPT2_VOCABULARY = 256


@dataclass(frozen=True)
class JobSizes:
    """Sizes of everything that is run.

    Attributes:
        dropout: the job with dropout that is profiled.
        strict: jobs that must be equal under every plan by rules.
        streamed: the job that is streamed while lanes are late.
        measured: the job of the command's own steps.
        small: the job of a small model.
        steps: number of iterations of comparisons, and of timings.
        late_s: seconds that lanes are late.
        pinned_bytes: bytes that are pinned to measure the rate.
        method: the method of planning.
    """

    dropout: GpuJob
    strict: tuple[GpuJob, ...]
    streamed: GpuJob
    measured: GpuJob
    small: GpuJob
    steps: tuple[int, int]
    late_s: float
    pinned_bytes: int
    method: str


def gpt2(layers: int, width: int, batch: int, length: int, device: str) -> GpuJob:
    """Make the job of a GPT-2 over bytes in float32, with its dropout."""
    overrides = {
        "n_layer": layers,
        "n_embd": width,
        "n_head": max(1, width // 64),
        "vocab_size": GPT2_VOCABULARY,
        "n_positions": length,
    }
    return GpuJob("gpt2", overrides, batch, length, "float32", device, 12 * 10**9, 10**9)


def llama(layers: int, width: int, vocabulary: int, batch: int, length: int, dtype: str, device: str) -> GpuJob:
    """Make the job of a Llama with heads of 64."""
    heads = max(1, width // 64)
    overrides = {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "intermediate_size": 256 * -(-8 * width // 768),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "vocab_size": vocabulary,
    }
    return GpuJob("llama", overrides, batch, length, dtype, device, 12 * 10**9, 10**9)


def sizes_of(device: str) -> JobSizes:
    """Return sizes that keep a card busy, or that a CPU does in seconds."""
    if device == "cuda":
        return JobSizes(
            dropout=gpt2(12, 768, 4, 256, device),
            strict=(
                gpt2(2, 256, 2, 512, device),
                llama(2, 256, 512, 2, 512, "float32", device),
                llama(2, 256, 512, 2, 512, "bfloat16", device),
            ),
            streamed=llama(8, 1024, 32000, 2, 512, "bfloat16", device),
            measured=GpuJob("llama", {"num_hidden_layers": 8}, 4, 512, "bfloat16", device, 12 * 10**9, 10**9),
            small=gpt2(12, 768, 4, 256, device),
            steps=(3, 20),
            late_s=1e-3,
            pinned_bytes=1 << 30,
            method="auto",
        )
    measured = llama(4, 256, 256, 1, 16, "float32", device)
    return JobSizes(
        dropout=gpt2(2, 64, 2, 32, device),
        strict=(gpt2(1, 64, 2, 32, device), llama(1, 64, 256, 2, 32, "bfloat16", device)),
        streamed=llama(2, 64, 256, 2, 32, "float32", device),
        measured=GpuJob(**{**asdict(measured), "limit_bytes": 30_000_000}),
        small=gpt2(2, 64, 2, 32, device),
        steps=(2, 5),
        late_s=2e-4,
        pinned_bytes=1 << 20,
        method="offmate",
    )


def steps_of(device: str, out: Path, host_bytes: int) -> list[CommandStep]:
    """Return all steps in order."""
    sizes = sizes_of(device)
    folder = str(out / CARRIED)
    few, many = sizes.steps

    def step(name: str, about: str, limit_s: float, kind: str, **asked: Any) -> CommandStep:
        return CommandStep(name, about, limit_s, {"kind": kind, "device": device, **asked})

    def job(which: GpuJob) -> dict[str, Any]:
        return asdict(which)

    quick = {"seconds_per_call": 0.005, "min_samples": 2}
    trained = {"folder": folder, "steps": 3}
    found = [
        step("card", "what there is", 60, "card", folder=folder, pinned_bytes=sizes.pinned_bytes),
        step("profile", "every call of GPT-2 with dropout, timed", 90, "profile", job=job(sizes.dropout), **quick),
        step("tests-tiers", "tests of the machine and of its lower tiers", 120, "tests", files=TESTS_OF_TIERS),
        step("tests-training", "tests of training", 150, "tests", files=TESTS_OF_TRAINING),
        step(
            "strict",
            "plans by rules against plain PyTorch, fused, deterministic",
            90,
            "strict",
            jobs=[job(each) for each in sizes.strict],
            steps=few,
            repeats=True,
        ),
        step(
            "lanes",
            "a Llama, streamed, while copies or computing are late: finds a missing wait",
            90,
            "lanes",
            job=job(sizes.streamed),
            steps=few,
            late_s=sizes.late_s,
            repeats=True,
        ),
        step("noise", "plain PyTorch against itself", 45, "noise", job=job(sizes.streamed), steps=2 * few, times=3),
        step("idle", "the sum of calls against eager steps", 60, "idle", job=job(sizes.streamed), steps=many, **quick),
        CommandStep(
            "measure",
            "rates, trace and costs of 8 layers",
            120,
            {"kind": "measure", "device": device, "job": job(sizes.measured), "folder": folder, **quick},
            {"host_bytes": host_bytes},  # no part of `asked`, for it differs from call to call
        ),
        CommandStep(
            "plan",
            "plans for it, where a solver is",
            120,
            {"kind": "plan", "device": device, "folder": folder, "fractions": FRACTIONS, "method": sizes.method},
            after=("measure",),
        ),
        CommandStep(
            "train",
            "trains under the plans",
            120,
            {"kind": "train", "device": device, "only": ["stowage"], "traced": True, "limit_s": 120, **trained},
            after=("plan",),
        ),
        CommandStep(
            "no-limit",
            "plain PyTorch without a limit",
            90,
            {"kind": "train", "device": device, "only": ["no limit"], "traced": False, "limit_s": 90, **trained},
            after=("plan",),
        ),
        step("small", "a small GPT-2 under keep-all against eager", 60, "small", job=job(sizes.small), steps=many),
    ]
    others = sorted({file.name for file in TESTS.glob("test_*.py")} - {*TESTS_OF_TIERS, *TESTS_OF_TRAINING})
    if device == "cuda" and others:  # a CPU runs them with all other tests
        found.append(step("tests-others", "all other tests for a card", 400, "tests", files=others))
    return found


def first(
    out: Path,
    device: str,
    say: Callable[[str], None],
    *,
    host_bytes: int,
    budget_s: float = BUDGET_S,
    again: Collection[str] = (),
    only: Collection[str] = (),
) -> dict[str, StepResult]:
    """Ask everything that is not answered yet, and write `first.md` in `out` after every step.

    Args:
        out: folder of results, logs and what is carried.
        device: `cuda` or `cpu`.
        say: receives what people should know.
        host_bytes: what plans may take of the host.
        budget_s: seconds for all of it; what is left is for the next call.
        again: names of steps to repeat; `fell` stands for those that did not hold, `all` for all.
        only: names of steps; by default all.

    Raises:
        ParameterError: there is no such step.
        StowageError: another call is at work in `out`.
    """
    steps = steps_of(device, out, host_bytes)
    command = f"{Path(sys.executable).name} -m stowage.flows.gpu first --out {out}"
    command += "" if device == "cuda" else f" --device {device}"
    code = _code()

    def show(results: Mapping[str, StepResult]) -> None:
        write_atomically(out / PAGE, page_of(steps, results, device, command, code).encode())

    runner = Runner(steps, out / "steps", say, show)
    return runner.run(budget_s, again=again, only=only)


def _code() -> str:
    """Return the version of this code; empty where it is unknown."""
    here = Path(__file__).resolve().parent
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=here, capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
