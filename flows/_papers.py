"""The tables of the OffMate preprint, planned here: its machines and models, overheads as the referee finds them.

What is published was measured there; what stands beside it is planned here, from estimated costs. The base of every
overhead is that of the preprint: T_f + T_b + P / α_G, every operation once with unlimited memory.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from stowage.flows._planning import Effort, plan_step
from stowage.stages.ir.costs import DeviceDescription
from stowage.stages.ir.errors import Infeasible
from stowage.stages.ir.machine import Link
from stowage.stages.options.tasks import GridSize
from stowage.stages.solve import Below
from stowage.stages.solver.outcome import SolverSettings
from stowage.stages.workload import build_workload

GB, GIB = 10**9, 1 << 30

ADAM_TRAFFIC = 7
"""Bytes that an AdamW update in one precision moves per byte of weights: reads of g, w, m, v and writes of w, m, v."""


@dataclass(frozen=True)
class PaperMachine:
    """A machine of the preprint (its section 5); what it does not state is marked as assumed.

    Attributes:
        device: rates of the GPU. Achieved flops are assumed.
        budget_bytes: the card's memory less the 2 GB that the preprint leaves.
        below: pinned memory behind it: the link as measured there, both directions at once as fast as each alone.
    """

    device: DeviceDescription
    budget_bytes: int
    below: Below


def _machine(name: str, memory: int, flops: float, traffic: float, link: float, gpu: float, cpu: float) -> PaperMachine:
    device = DeviceDescription(
        fingerprint=name.replace(" ", "-"),
        name=name,
        type="cuda",
        memory_bytes=memory,
        flops_per_s=flops,
        memory_copy_bytes_per_s=traffic,
        disk_read_bytes_per_s=1.0 * GB,
        disk_write_bytes_per_s=1.0 * GB,
        disk_duplex_bytes_per_s=1.0 * GB,
        update_bytes_per_s=ADAM_TRAFFIC * gpu,
        dispatch_s=5e-6,
    )
    below = Below(
        Link(link, link, 2 * link), capacity_bytes=int(0.9 * 128 * GB), cpu_update_bytes_per_s=ADAM_TRAFFIC * cpu
    )
    return PaperMachine(device, memory - 2 * GIB, below)


MACHINES = {
    "RTX 3060": _machine("RTX 3060", 12 * GIB, 7.9e12, 320 * GB, 10.4 * GB, 16.6 * GB, 1.1 * GB),
    "RTX 3090": _machine("RTX 3090", 24 * GIB, 21e12, 840 * GB, 12.0 * GB, 40.0 * GB, 1.6 * GB),
}
"""α_G and α_C in bytes of weights per second. Flops, memory traffic and the 3090's link are assumed."""

PUBLISHED = {
    "RTX 3060": {"all": 0.137, "no CPU update": 0.216, "no activation offload": 0.323},
    "RTX 3090": {"all": 0.243, "no CPU update": 0.274, "no activation offload": 0.423},
}
"""Table 2 of the preprint, measured there. The thesis reports 20.3, 39.5 and 35.0% for the first machine."""

BATCH = {"RTX 3060": 4, "RTX 3090": 8}


@dataclass(frozen=True)
class PaperRow:
    """One plan.

    Attributes:
        machine, model, case: which.
        overhead: predicted step time over the base, less 1; NaN where there is no plan.
        published: of the preprint, NaN where it gives none.
        peak_bytes, budget_bytes: of the device.
        host_bytes: what the plan keeps below.
        base_s: T_f + T_b + P / α_G.
        plan_s: time to plan; the first case of a machine makes the options of its blocks.
    """

    machine: str
    model: str
    case: str
    overhead: float
    published: float
    peak_bytes: int
    budget_bytes: int
    host_bytes: int
    base_s: float
    plan_s: float


def cases(below: Below) -> dict[str, Below]:
    """The ablations of Table 2."""
    return {
        "all": below,
        "no CPU update": replace(below, cpu_update_bytes_per_s=0.0),
        "no activation offload": replace(below, activations=False),
    }


def table_2(
    machines: tuple[str, ...] = tuple(MACHINES), say: Callable[[str], None] = lambda text: None
) -> Iterator[PaperRow]:
    """Llama2-7B in float32, batch × 512, with each ablation."""
    with tempfile.TemporaryDirectory() as store:
        for name in machines:
            workload = build_workload("llama", {}, batch_size=BATCH[name], sequence_length=512, seed=0, fake=True)
            optimizer = torch.optim.AdamW(workload.model.parameters(), lr=1e-4)
            for case, below in cases(MACHINES[name].below).items():
                row = plan_case(workload, optimizer, name, "Llama2-7B fp32", case, below, Path(store))
                say(describe(row))
                yield row


def plan_case(
    workload: Any, optimizer: Any, machine: str, model: str, case: str, below: Below, store: Path
) -> PaperRow:
    """One plan on one machine."""
    described = MACHINES[machine]
    start = time.perf_counter()
    nan = float("nan")
    published = PUBLISHED.get(machine, {}).get(case, nan)
    try:
        planned = plan_step(
            workload.model,
            workload.batch,
            loss=None,
            optimizer=optimizer,
            device_budget=described.budget_bytes,
            method="offmate",
            home=store / machine.replace(" ", "-"),
            costs="roofline",
            effort=Effort(grid=GridSize(peak_budgets=3, save_budgets=3), solver=SolverSettings(time_limit_s=2.0)),
            target=described.device,
            below=below,
        )
    except Infeasible as infeasible:
        seconds = time.perf_counter() - start
        smallest = infeasible.smallest_feasible_bytes
        return PaperRow(machine, model, case, nan, published, smallest, described.budget_bytes, 0, nan, seconds)
    s = planned.summary
    return PaperRow(
        machine=machine,
        model=model,
        case=case,
        overhead=s.step_time_s / s.lower_bound_s - 1,
        published=published,
        peak_bytes=s.device_peak_bytes,
        budget_bytes=s.device_budget_bytes,
        host_bytes=s.below_bytes,
        base_s=s.lower_bound_s,
        plan_s=time.perf_counter() - start,
    )


def describe(row: PaperRow) -> str:
    """One line for people."""
    found = f"{row.overhead:+.1%}" if row.overhead == row.overhead else "no plan"
    return (
        f"{row.machine}, {row.model}, {row.case}: planned {found}, measured there {row.published:+.1%}; peak "
        f"{row.peak_bytes / GIB:.2f} of {row.budget_bytes / GIB:.0f} GiB, host {row.host_bytes / GB:.0f} GB, base "
        f"{row.base_s:.2f} s; planned in {row.plan_s:.0f} s"
    )
