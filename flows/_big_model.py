"""Plan a model that does not fit this machine: no weights in memory, costs from the roofline."""

from __future__ import annotations

import resource
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from stowage.flows._planning import plan_step, target_device
from stowage.stages.ir.errors import MIB
from stowage.stages.workload import build_workload


@dataclass(frozen=True)
class BigPlan:
    """What planning took, and what it found.

    Attributes:
        stages: seconds by stage, in order.
        total_s: from nothing to `step.py`, building the model included.
        process_bytes: highest resident memory of the planning process.
        parameter_bytes: what the weights alone would take.
        calls, distinct_calls, blocks: size of the problem.
        budget_bytes, peak_bytes, overhead: of the plan; overhead is predicted time over the lower bound.
        lines: of `step.py`.
    """

    stages: dict[str, float]
    total_s: float
    process_bytes: int
    parameter_bytes: int
    calls: int
    distinct_calls: int
    blocks: int
    budget_bytes: int
    peak_bytes: int
    overhead: float
    lines: int


def plan_llama2_7b(budget: str = "85%") -> BigPlan:
    """Llama2-7B in float32 with AdamW, batch 4 × 512, with empty stores, on this machine's rates."""
    started = time.perf_counter()
    marks: list[tuple[str, float]] = []
    workload = build_workload("llama", {}, batch_size=4, sequence_length=512, seed=0, fake=True)
    optimizer = torch.optim.AdamW(workload.model.parameters(), lr=1e-4)
    with tempfile.TemporaryDirectory() as empty:
        target = target_device("cpu", Path(empty))
        planned = plan_step(
            workload.model,
            workload.batch,
            loss=None,
            optimizer=optimizer,
            device_budget=budget,
            method="auto",
            home=Path(empty),
            costs="roofline",
            target=target,
            progress=lambda stage: marks.append((stage, time.perf_counter())),
        )
    ended = time.perf_counter()
    ends = [when for _, when in marks[1:]] + [ended]
    return BigPlan(
        stages={stage: end - start for (stage, start), end in zip(marks, ends)},
        total_s=ended - started,
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


def describe(plan: BigPlan) -> str:
    """Two lines for people."""
    stages = ", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in plan.stages.items())
    process, weights = f"{plan.process_bytes / MIB:,.0f} MiB", f"{plan.parameter_bytes / MIB:,.0f} MiB"
    return (
        f"Llama2-7B, fp32, 4 × 512: {plan.calls} calls ({plan.distinct_calls} distinct), {plan.blocks} blocks, budget "
        f"{plan.budget_bytes / MIB:,.0f} MiB, predicted peak {plan.peak_bytes / MIB:,.0f} MiB, {plan.overhead:.3f} × "
        f"the lower bound; planned in {plan.total_s:.0f} s ({stages}) to {plan.lines} lines of step.py, in a process "
        f"of {process} where the weights alone take {weights}."
    )
