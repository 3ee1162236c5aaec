"""Plans the tables of the OffMate preprint on its machines and models, with overheads as the referee finds them.

Published numbers were measured by its authors; those beside them are planned here, from estimated costs. The base of
every overhead is that of the preprint: T_f + T_b + P / α_G, every operation once with unlimited memory.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import polars as pl
import torch

from stowage.flows.benchmarks.markdown import markdown
from stowage.flows.benchmarks.papers.machines import GB, GIB, MACHINES, OTHERS, TABLE_2, PaperModel
from stowage.flows.planning.step import Effort, Planning, StepToPlan, plan_step
from stowage.stages.ir.errors import Infeasible
from stowage.stages.options.tasks import GridSize
from stowage.stages.report.frames import frame_of
from stowage.stages.solve import LowerTier
from stowage.stages.solver.outcome import SolverSettings

PREPRINT = "preprint's formulation"

EFFORT = Effort(grid=GridSize(peak_budgets=3, save_budgets=3), solver=SolverSettings(time_limit_s=2.0))
"""Effort of planning one case."""


@dataclass(frozen=True)
class PaperRow:
    """One row of the table: the plan of a model within a machine's budget.

    Attributes:
        machine: name of the machine.
        model: name of the model.
        case: name of the case.
        overhead: predicted step time over the base, less 1; NaN where there is no plan.
        fractional_overhead: the overhead of O-ILP's answer in fractions, before tensors are whole.
        published: the preprint's overhead, NaN where it gives none.
        peak_bytes: predicted peak of the device.
        budget_bytes: budget of the device.
        host_bytes: bytes that the plan keeps in the lower tier.
        base_s: T_f + T_b + P / α_G.
        plan_s: time to plan; the first case of a machine makes the options of its blocks.
    """

    machine: str
    model: str
    case: str
    overhead: float
    fractional_overhead: float
    published: float
    peak_bytes: int
    budget_bytes: int
    host_bytes: int
    base_s: float
    plan_s: float


def cases(lower_tier: LowerTier, *, ablations: bool) -> dict[str, tuple[str, LowerTier]]:
    """Map each case to its method and lower tier: our plans, the preprint's formulation, and ablations of ours."""
    found = {"all": ("offmate", lower_tier), PREPRINT: ("offmate_preprint", lower_tier)}
    if ablations:
        found["no CPU update"] = ("offmate", replace(lower_tier, cpu_update_bytes_per_s=0.0))
        found["no activation offload"] = ("offmate", replace(lower_tier, activations=False))
    return found


def paper_rows(
    models: tuple[PaperModel, ...] = (*TABLE_2, *OTHERS), say: Callable[[str], None] = lambda text: None
) -> Iterator[PaperRow]:
    """Plan every model with every case; ablations where the preprint has them."""
    with tempfile.TemporaryDirectory() as store:
        for model in models:
            lower_tier = MACHINES[model.machine].lower_tier
            for case, (method, tier) in cases(lower_tier, ablations=len(model.published) > 1).items():
                row = plan_case(model, case, method, tier, Path(store))
                say(describe(row))
                yield row


def plan_case(paper: PaperModel, case: str, method: str, lower_tier: LowerTier, store: Path) -> PaperRow:
    """Plan one case on its machine."""
    machine = MACHINES[paper.machine]
    start = time.perf_counter()
    nan = float("nan")
    model, batch, layouts = paper.build()
    published = paper.published.get(case, nan)
    try:
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
        target = machine.device_for(paper.dtype)
        how = Planning(
            stores=store / target.fingerprint,
            effort=EFFORT,
            costs="roofline",
            target=target,
            method=method,
            lower_tier=lower_tier,
        )
        step = StepToPlan(model=model, batch=batch, optimizer=optimizer, layouts=layouts)
        planned = plan_step(step, machine.budget_bytes, how)
    except Infeasible as infeasible:
        seconds = time.perf_counter() - start
        smallest = infeasible.smallest_feasible_bytes
        return PaperRow(
            paper.machine, paper.name, case, nan, nan, published, smallest, machine.budget_bytes, 0, nan, seconds
        )
    s = planned.summary
    return PaperRow(
        machine=paper.machine,
        model=paper.name,
        case=case,
        overhead=s.step_time_s / s.keep_all_time_s - 1,
        fractional_overhead=s.fractional_time_s / s.keep_all_time_s - 1,
        published=published,
        peak_bytes=s.device_peak_bytes,
        budget_bytes=s.device_budget_bytes,
        host_bytes=s.lower_tier_bytes,
        base_s=s.keep_all_time_s,
        plan_s=time.perf_counter() - start,
    )


def describe(row: PaperRow) -> str:
    """Describe a row in one line for people."""
    found = f"{row.overhead:+.1%}" if row.overhead == row.overhead else "no plan"
    there = f"measured there {row.published:+.1%}" if row.published == row.published else "no number there"
    return (
        f"{row.machine}, {row.model}, {row.case}: planned {found} (fractions {row.fractional_overhead:+.1%}), {there}; "
        f"peak {row.peak_bytes / GIB:.2f} of {row.budget_bytes / GIB:.0f} GiB, host {row.host_bytes / GB:.0f} GB, base "
        f"{row.base_s:.2f} s; planned in {row.plan_s:.0f} s"
    )


def markdown_of(rows: list[PaperRow]) -> str:
    """Return the rows as a Markdown table, as README shows it."""
    frame = frame_of(PaperRow, rows).select(
        "machine",
        "model",
        "case",
        pl.struct("overhead").alias("planned here"),
        pl.col("published").alias("measured there"),
        pl.struct("peak_bytes", "budget_bytes").alias("device peak"),
        pl.col("host_bytes").alias("host"),
    )
    return markdown(
        frame,
        formats={
            "planned here": lambda x: "no plan" if math.isnan(x["overhead"]) else f"{x['overhead']:+.1%}",
            "measured there": lambda x: f"{x:+.1%}",
            "device peak": lambda x: f"{x['peak_bytes'] / GIB:.2f} of {x['budget_bytes'] / GIB:.0f} GiB",
            "host": lambda x: f"{x / GB:.0f} GB",
        },
    )
