"""Plans a sharded step of the paper's models as a whole, and judges the choices of groups by the same referee.

A plan is made of gathers, scatters, recomputation, offloads, and updates by the CPU, for one of `n` ranks. The referee
replays it row by row. Fixed policies, Elixir's greedy choice and the exact one are lowered to such plans too: what they
take is compared with what planning finds.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from stowage.flows.benchmarks.elixir.engines import Configuration
from stowage.flows.benchmarks.elixir.machines import DRIVER_BYTES
from stowage.flows.benchmarks.elixir.models import Gpt2
from stowage.flows.benchmarks.elixir.rank_time import rank_time
from stowage.flows.benchmarks.elixir.sharded_machine import ShardedMachine, sharded_machine
from stowage.flows.benchmarks.elixir.sharded_step import sharded_step, sharded_trace, step_times
from stowage.flows.planning.costed import Costed
from stowage.flows.planning.effort import QUICK
from stowage.flows.planning.job import Planning
from stowage.flows.planning.step import solve_costed
from stowage.stages.ir.errors import Infeasible, NoRoomInLowerTier
from stowage.stages.ir.parallel import GroupChoice, ParallelMachine
from stowage.stages.solve.collectives.groups import GroupsChoice, lowered
from stowage.stages.solve.collectives.policies import is_gather
from stowage.stages.solve.offload.offloader import Offloader
from stowage.stages.solve.program.chain import Chain
from stowage.stages.solve.program.of_trace import program_of
from stowage.stages.solve.program.program import StepProgram
from stowage.stages.solve.proposal import JudgedPlan
from stowage.stages.solve.referee import Referee


def plan_b_time(c: Configuration, machine: ParallelMachine, budget: int) -> float | None:
    """Return the seconds of a planned step, or None where nothing fits.

    Args:
        c: the model, its batch, and the machine's constants.
        machine: the rates of the ranks.
        budget: bytes of each device, the driver's included.
    """
    with tempfile.TemporaryDirectory() as stores:
        found = planned(case_of(c, machine, budget, Path(stores)))
    return found.time_s if found else None


@dataclass(frozen=True)
class Planned:
    """What planning finds: seconds of a step, most bytes on the device, and how the plan was made."""

    time_s: float
    device_bytes: int
    method: str


@dataclass(frozen=True)
class Case:
    """A sharded step to plan on one rank of a machine.

    Attributes:
        model: the model.
        costed: its step.
        parallel: the machine with all its ranks.
        machine: the rank's device and its part of the host.
        budget: bytes of the device that a plan may use.
        planning: how plans are found.
    """

    model: Gpt2
    costed: Costed
    parallel: ParallelMachine
    machine: ShardedMachine
    budget: int
    planning: Planning

    @cached_property
    def program(self) -> StepProgram:
        """Return the program that is planned."""
        return program_of(self.costed.variants[0].trace, self.costed.variants[0].nodes)

    @cached_property
    def chain(self) -> Chain:
        """Return its blocks with their schedules."""
        options = self.costed.options_for("auto", self.planning.stores, self.planning.effort)
        return Chain(self.costed.variants[0].blocks, self.costed.variants[0].nodes, options)

    @cached_property
    def referee(self) -> Referee:
        """Return what judges plans."""
        return Referee(self.program, self.budget)

    @cached_property
    def offloader(self) -> Offloader:
        """Return the program with its lower tier."""
        return Offloader(self.program, self.chain, self.machine.host)


def case_of(c: Configuration, machine: ParallelMachine, budget: int, stores: Path) -> Case:
    """Trace a configuration, and cost it."""
    flops, traffic = c.machine.constants.matmul_flops, c.machine.memory_bytes_per_s
    rank = sharded_machine(machine, flops, traffic)
    planning = Planning(stores=stores, costs="roofline", target=rank.device, lower_tier=rank.host, effort=QUICK)
    times = step_times(c.model, c.batch, flops, traffic)
    costed = sharded_step(sharded_trace(c.model, c.batch, machine.ranks), times, rank.device, QUICK, stores)
    return Case(c.model, costed, machine, rank, budget - DRIVER_BYTES, planning)


def planned(case: Case) -> Planned | None:
    """Plan a step; return None where nothing fits."""
    try:
        solved, _ = solve_costed(case.costed, case.budget, case.planning)
    except (Infeasible, NoRoomInLowerTier):
        return None
    summary = solved.summary
    seconds = rank_time(solved.rows, case.program.nodes, summary.step_time_s, case.parallel)
    return Planned(seconds, summary.device_peak_bytes, summary.method)


def lowered_plan(case: Case, choices: Sequence[GroupChoice], name: str) -> JudgedPlan:
    """Return the plan that a choice for every group makes, with its collectives and copies hidden as in any plan.

    The root is the first group, and each other group a layer. Every layer is computed again in backward, as the table
    of groups has it.
    """
    program, nodes = case.program, case.program.nodes
    owner = {s.storage: _group(s.name) for s in program.storages if s.role == "parameter"}
    host = frozenset(s for s, g in owner.items() if choices[g].on_host)
    kept = frozenset(n.node for n in nodes if is_gather(n) and all(choices[owner[s]].keep for s in n.reads))
    executions = case.offloader.executions(case.chain.leanest_options)
    proposal = lowered(case.offloader, executions, GroupsChoice(host, kept), method=name)
    return case.referee.judge(replace(proposal, hide_at_once=True))


def _group(parameter: str) -> int:
    """Return the number of the group that a parameter is in: 0 is the root, and the others are layers."""
    words = parameter.split(".")
    return int(words[words.index("h") + 1]) + 1 if "h" in words else 0


def lowered_times(case: Case, choices: Mapping[str, Sequence[GroupChoice]]) -> dict[str, float | None]:
    """Return the seconds of each choice as a plan; None where it does not fit."""
    found = {name: lowered_plan(case, chosen, name) for name, chosen in choices.items()}
    return {name: _seconds(case, plan) if case.referee.fits(plan) else None for name, plan in found.items()}


def _seconds(case: Case, plan: JudgedPlan) -> float:
    return rank_time(plan.outcome.rows, case.program.nodes, plan.time_s, case.parallel)
