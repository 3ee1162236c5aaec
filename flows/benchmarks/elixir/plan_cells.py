"""Plans a sharded step for each cell of the paper's tables, and keeps each cell as soon as it is planned."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from stowage.flows.benchmarks.elixir.engines import Configuration
from stowage.flows.benchmarks.elixir.group_plans import EXACT, GroupPlan, group_plans
from stowage.flows.benchmarks.elixir.kept import Kept
from stowage.flows.benchmarks.elixir.machines import DRIVER_BYTES
from stowage.flows.benchmarks.elixir.models import MODELS
from stowage.flows.benchmarks.elixir.plan_b import Planned, case_of, planned
from stowage.flows.benchmarks.elixir.rows import EFFORT, sharding_problem
from stowage.flows.planning.effort import processor_s
from stowage.flows.planning.sharding import plan_groups

CELLS = "elixir_cells"
"""Folder of what is planned, beside the results of the benchmark."""


@dataclass(frozen=True)
class PlanCell:
    """A planned cell; times are None where nothing fits.

    Attributes:
        machine, model, ranks, batch: the configuration.
        plan_s: seconds of a step of the plan, which the choices for groups take part in.
        device_bytes: most bytes on its device, with the driver's; None where nothing fits.
        method: how it was made.
        groups_s: seconds of each way to choose for groups, all judged by the referee of plans.
        on_fsdp2_s: seconds of the best choice as FSDP2 would run it.
        planned_s: seconds of the processor that planning took, from the model's description to the plan.
    """

    machine: str
    model: str
    ranks: int
    batch: int
    plan_s: float | None
    device_bytes: int | None
    method: str
    groups_s: Mapping[str, float | None]
    on_fsdp2_s: float | None
    planned_s: float

    @property
    def tflops(self) -> float | None:
        """Return its TFLOPS, None where nothing fits."""
        return MODELS[self.model].flops(self.batch) / self.plan_s / 1e12 if self.plan_s else None

    @property
    def words(self) -> str:
        """Return its TFLOPS for people."""
        return "OOM" if self.tflops is None else f"{self.tflops:.0f}"


class PlanCells:
    """The cells that are planned."""

    def __init__(self, kept: Kept, say: Callable[[str], None] = lambda text: None) -> None:
        self._kept, self._say = kept, say

    def of(self, c: Configuration) -> PlanCell:
        """Return a cell, planned now or before."""
        before = self.kept(c)
        if before is not None:
            return before
        cell = plan_cell(c)
        self._kept.keep(asdict(cell), *_name(c))
        said = "nothing fits" if cell.plan_s is None else f"{cell.plan_s:.2f} s by {cell.method}"
        self._say(f"{c.ranks} × {c.machine.name}, {c.model.name}, batch {c.batch}: {said}, in {cell.planned_s:.0f} s")
        return cell

    def kept(self, c: Configuration) -> PlanCell | None:
        """Return a cell that was planned before, by the same code."""
        found = self._kept.find(*_name(c))
        return None if found is None else PlanCell(**found)


def _name(c: Configuration) -> tuple[object, ...]:
    return c.machine.name, c.model.name, c.ranks, c.batch


def plan_cell(c: Configuration) -> PlanCell:
    """Plan a cell: the fastest of what planning finds and of the choices for groups."""
    problem = sharding_problem(c)
    on_fsdp2 = plan_groups(problem, EFFORT)
    started = processor_s()
    with tempfile.TemporaryDirectory() as stores:
        case = case_of(c, problem.machine, problem.device_budget, Path(stores))
        found = planned(case)
        planned_s = processor_s() - started
        groups = group_plans(case, {k.name: k.choices for k in on_fsdp2.contestants})
    chosen, method = fastest(found, groups)
    plan_s, device_bytes = (chosen.time_s, chosen.device_bytes + DRIVER_BYTES) if chosen else (None, None)
    best = on_fsdp2.best.judged.time_s if on_fsdp2.best else None
    name = c.machine.name, c.model.name, c.ranks, c.batch
    groups_s = {key: plan and plan.time_s for key, plan in groups.items()}
    return PlanCell(*name, plan_s, device_bytes, method, groups_s, best, planned_s)


def fastest(found: Planned | None, groups: Mapping[str, GroupPlan | None]) -> tuple[GroupPlan | None, str]:
    """Return time and memory of the faster one of a plan and of the choices for groups, and how it was made.

    The referee, which chooses plans, knows nothing of what collectives cost computing: so one of the choices may be
    faster after all.
    """
    ways = [(GroupPlan(found.time_s, found.device_bytes), found.method)] if found is not None else []
    exact = groups[EXACT]
    if exact is not None:
        ways.append((exact, "groups"))
    return min(ways, key=lambda way: way[0].time_s, default=(None, ""))
