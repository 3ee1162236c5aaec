"""Judges the choices for groups of a sharded step as plans, with the same referee as plans that are made of everything.

The root is the first group, and each other group a layer, as FSDP2 has them. Every layer is computed again in backward,
as the table of groups has it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from stowage.flows.benchmarks.elixir.plan_b import Case, seconds_of
from stowage.stages.ir.parallel import GroupChoice
from stowage.stages.solve.collectives.group_race import GroupRace
from stowage.stages.solve.collectives.group_table import table_of
from stowage.stages.solve.collectives.groupings import by_layer
from stowage.stages.solve.collectives.groups import lowered
from stowage.stages.solve.proposal import JudgedPlan, Task

EXACT, GREEDY = "exact", "greedy"
POLICIES = ("ZeRO-2", "ZeRO-3", "ZeRO-2 offloaded", "ZeRO-3 offloaded")

Choices = Sequence[GroupChoice]


def lowered_plan(case: Case, choices: Choices, name: str) -> JudgedPlan:
    """Return the plan that a choice for every group makes, with its collectives and copies hidden as in any plan."""
    executions = case.offloader.leanest()
    table = table_of(case.offloader, executions, by_layer(case.program), case.budget)
    proposal = lowered(case.offloader, executions, table.choice(choices), method=name)
    return case.referee.judge(replace(proposal, hide_at_once=True))


class GroupPlan(NamedTuple):
    """Seconds of a step, and most bytes on the device."""

    time_s: float
    device_bytes: int


def group_plans(case: Case, on_fsdp2: Mapping[str, Choices]) -> dict[str, GroupPlan | None]:
    """Return time and memory of each way to choose for groups, None where it does not fit.

    The exact choice is the fastest of all that this referee has seen: its own answers, those for FSDP2, and whatever
    they began with. So it is of the greedy choice.

    Args:
        case: the step.
        on_fsdp2: what the race in FSDP2's simulator has chosen from, by name.
    """
    others = {f"{name} on FSDP2": choices for name, choices in on_fsdp2.items() if name in (EXACT, GREEDY)}
    race = GroupRace(case.offloader, by_layer(case.program), others)
    task = Task(case.program, case.chain, case.planning.request(case.budget, case.machine.device))
    found: dict[str, GroupPlan | None] = dict.fromkeys((EXACT, GREEDY, *POLICIES))
    for plan in case.referee.listen(race.propose(task)):
        name = plan.method.removeprefix("groups, ").removesuffix(" on FSDP2")
        if case.referee.fits(plan) and name in found:  # ZeRO-1 is no choice of four states
            seen = GroupPlan(seconds_of(case, plan), plan.peak_bytes)
            for key in dict.fromkeys((EXACT, name)):
                found[key] = min(seen, found[key] or seen)
    return found
