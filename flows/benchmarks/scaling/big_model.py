"""Plans models that do not fit this machine: no weights in memory, costs from the roofline, a process for each.

`python -m stowage.flows.benchmarks.scaling.big_model NAME` plans one and prints its `BigPlan` as JSON.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from stowage.flows.benchmarks.papers.machines import MACHINES, PaperMachine
from stowage.flows.pipeline.project import find_root, stage_environment
from stowage.flows.planning.step import Planning, StepToPlan, plan_step, processor_s, target_device
from stowage.stages.ir.command import Parser
from stowage.stages.ir.errors import MIB, StowageError
from stowage.stages.workload import build_workload

TB = 10**12


@dataclass(frozen=True)
class BigModel:
    """A model to plan.

    Attributes:
        label: name for people.
        method: see `fit`.
        overrides: overrides of transformers' Llama, whose defaults are those of Llama2-7B.
        machine: a machine of the preprint with its lower tier; None for this machine without offloading.
        budget: device budget where there is no `machine`.
        dtype: type of weights, gradients and states.
        batch_size: samples of the batch.
        length: tokens of a sample.
    """

    label: str
    method: str
    overrides: dict[str, Any] = field(default_factory=dict)
    machine: PaperMachine | None = None
    budget: str = "85%"
    dtype: str = "float32"
    batch_size: int = 4
    length: int = 512


LLAMA3_70B = {
    "num_hidden_layers": 80,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}

# Weights and states of 70 B parameters take 423 GB: a host larger than the preprint's.
_LARGE_HOST = replace(MACHINES["RTX 3090"], lower_tier=replace(MACHINES["RTX 3090"].lower_tier, capacity_bytes=TB))

MODELS = {
    "llama2-7b": BigModel("Llama2-7B, float32, recomputing", "auto"),
    "llama2-7b-offmate": BigModel("Llama2-7B, float32, offloading", "offmate", machine=MACHINES["RTX 3060"]),
    "llama3-70b-offmate": BigModel(
        "Llama-3-70B, bfloat16, offloading", "offmate", LLAMA3_70B, machine=_LARGE_HOST, dtype="bfloat16"
    ),
}


@dataclass(frozen=True)
class BigPlan:
    """The result of planning, and what planning took.

    Attributes:
        label: what was planned, and for which device.
        stages: seconds by stage, in order; `model` is building it.
        total_s: from nothing to `step.py`, building the model included.
        processor_s: processor time, child processes included: less than `total_s` where others were busy.
        process_bytes: highest resident memory of the planning process.
        parameter_bytes: what the weights alone would take.
        calls: number of calls.
        distinct_calls: number of distinct calls.
        blocks: number of blocks.
        budget_bytes: device budget of the plan.
        peak_bytes: predicted peak of the plan.
        overhead: predicted time over the lower bound.
        lines: lines of `step.py`.
    """

    label: str
    stages: dict[str, float]
    total_s: float
    processor_s: float
    process_bytes: int
    parameter_bytes: int
    calls: int
    distinct_calls: int
    blocks: int
    budget_bytes: int
    peak_bytes: int
    overhead: float
    lines: int


def plan_big(name: str) -> BigPlan:
    """Plan one of `MODELS` with empty stores, in this process."""
    big = MODELS[name]
    marks, used = [("model", time.perf_counter())], processor_s()
    overrides = {"dtype": big.dtype} | big.overrides
    workload = build_workload(
        "llama", overrides, batch_size=big.batch_size, sequence_length=big.length, seed=0, fake=True
    )
    optimizer = torch.optim.AdamW(workload.model.parameters(), lr=1e-4)
    with tempfile.TemporaryDirectory() as empty:
        target = target_device("cpu", Path(empty)) if big.machine is None else big.machine.device
        how = Planning(
            stores=Path(empty),
            costs="roofline",
            target=target,
            method=big.method,
            lower_tier=None if big.machine is None else big.machine.lower_tier,
            progress=lambda stage: marks.append((stage, time.perf_counter())),
        )
        step = StepToPlan(model=workload.model, batch=workload.batch, optimizer=optimizer)
        planned = plan_step(step, big.budget if big.machine is None else big.machine.budget_bytes, how)
    ended = time.perf_counter()
    ends = [when for _, when in marks[1:]] + [ended]
    return BigPlan(
        label=f"{big.label}, {big.batch_size} × {big.length}, {target.name}",
        stages={stage: end - start for (stage, start), end in zip(marks, ends, strict=True)},
        total_s=ended - marks[0][1],
        processor_s=processor_s() - used,
        process_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        parameter_bytes=sum(s.nbytes for s in planned.trace.storages if s.role == "parameter"),
        calls=len(planned.trace.calls),
        distinct_calls=len({c.signature for c in planned.trace.calls}),
        blocks=len(planned.blocks),
        budget_bytes=planned.summary.device_budget_bytes,
        peak_bytes=planned.summary.device_peak_bytes,
        overhead=planned.summary.step_time_s / planned.summary.lower_bound_s,
        lines=planned.source.count("\n"),
    )


def plan_all(say: Callable[[str], None] = lambda text: None, root: Path | None = None) -> Iterator[BigPlan]:
    """Plan every model, each in a process of its own, so that its memory can be measured.

    Raises:
        StowageError: one could not be planned.
    """
    folder = find_root(root)
    for name in MODELS:
        command = [sys.executable, "-m", "stowage.flows.benchmarks.scaling.big_model", name]
        run = subprocess.run(
            command, cwd=folder, env=stage_environment(folder), capture_output=True, text=True, check=False
        )
        if run.returncode:
            raise StowageError(f"{name} was not planned: {(run.stderr.strip().splitlines() or ['no message'])[-1]}")
        plan = BigPlan(**json.loads(run.stdout.strip().splitlines()[-1]))
        say(describe(plan))
        yield plan


def describe(plan: BigPlan) -> str:
    """Describe a plan in a few lines for people."""
    stages = ", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in plan.stages.items())
    process, weights = f"{plan.process_bytes / MIB:,.0f} MiB", f"{plan.parameter_bytes / MIB:,.0f} MiB"
    return (
        f"{plan.label}: {plan.calls} calls ({plan.distinct_calls} distinct), {plan.blocks} blocks, budget "
        f"{plan.budget_bytes / MIB:,.0f} MiB, predicted peak {plan.peak_bytes / MIB:,.0f} MiB, {plan.overhead:.3f} × "
        f"the lower bound; planned in {plan.total_s:.0f} s ({stages}), {plan.processor_s:.0f} s of processor time, to "
        f"{plan.lines} lines of step.py, in a process of {process} where the weights alone take {weights}."
    )


if __name__ == "__main__":
    parser = Parser(__doc__)
    parser.add_argument("name", help="of the model")
    print(json.dumps(asdict(plan_big(parser.parse_args().name))))
