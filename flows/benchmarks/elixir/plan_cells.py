"""Plans a sharded step for each cell of the paper's tables, and keeps each cell as soon as it is planned."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from stowage.flows.benchmarks.elixir.engines import Configuration
from stowage.flows.benchmarks.elixir.group_plans import EXACT, Choices, group_times
from stowage.flows.benchmarks.elixir.kept import Kept
from stowage.flows.benchmarks.elixir.plan_b import Planned, case_of, planned
from stowage.flows.benchmarks.elixir.rows import sharding_problem


@dataclass(frozen=True)
class PlanCell:
    """A planned cell; times are None where nothing fits.

    Attributes:
        machine, model, ranks, batch: the configuration.
        plan_s: seconds of a step of the plan, which the choices for groups take part in.
        method: how it was made.
        groups_s: seconds of each way to choose for groups, all judged by the referee of plans.
        planned_s: seconds that planning took, from the model's description to the plan.
    """

    machine: str
    model: str
    ranks: int
    batch: int
    plan_s: float | None
    method: str
    groups_s: Mapping[str, float | None]
    planned_s: float


class PlanCells:
    """The cells that are planned."""

    def __init__(self, kept: Kept, say: Callable[[str], None] = lambda text: None) -> None:
        self._kept, self._say = kept, say

    def of(self, c: Configuration, on_fsdp2: Mapping[str, Choices]) -> PlanCell:
        """Return a cell, planned now or before.

        Args:
            c: the configuration.
            on_fsdp2: see `group_times`.
        """
        before = self.kept(c)
        if before is not None:
            return before
        cell = plan_cell(c, on_fsdp2)
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


def plan_cell(c: Configuration, on_fsdp2: Mapping[str, Choices]) -> PlanCell:
    """Plan a cell: the fastest of what planning finds and of the choices for groups."""
    problem = sharding_problem(c)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as stores:
        case = case_of(c, problem.machine, problem.device_budget, Path(stores))
        found = planned(case)
        planned_s = time.perf_counter() - started
        groups_s = group_times(case, on_fsdp2)
    plan_s, method = fastest(found, groups_s)
    return PlanCell(c.machine.name, c.model.name, c.ranks, c.batch, plan_s, method, groups_s, planned_s)


def fastest(found: Planned | None, groups_s: Mapping[str, float | None]) -> tuple[float | None, str]:
    """Return the seconds of the faster one of a plan and of the choices for groups, and how it was made.

    The referee, which chooses plans, knows nothing of what collectives cost computing: so one of the choices may be
    faster after all.
    """
    ways = [(found.time_s, found.method)] if found is not None else []
    exact_s = groups_s[EXACT]
    if exact_s is not None:
        ways.append((exact_s, "groups"))
    return min(ways, default=(None, ""))
