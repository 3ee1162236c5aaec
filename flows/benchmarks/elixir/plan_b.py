"""Plans a sharded step of the paper's models as a whole.

A plan is made of gathers, scatters, recomputation, offloads, and updates by the CPU, for one of `n` ranks. The referee
replays it row by row.
"""

from __future__ import annotations

from dataclasses import dataclass
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
from stowage.stages.ir.errors import NO_PLAN
from stowage.stages.ir.parallel import ParallelMachine
from stowage.stages.solve.offload.offloader import Offloader
from stowage.stages.solve.program.chain import Chain
from stowage.stages.solve.program.of_trace import program_of
from stowage.stages.solve.program.program import StepProgram
from stowage.stages.solve.proposal import JudgedPlan
from stowage.stages.solve.referee import Referee


@dataclass(frozen=True)
class Planned:
    """What planning finds.

    Attributes:
        time_s: seconds of a step.
        referee_s: seconds without what collectives cost computing.
        device_bytes: most bytes on the device.
        method: how the plan was made.
        bound_s: no plan is faster, as far as computing and the rates tell.
    """

    time_s: float
    referee_s: float
    device_bytes: int
    method: str
    bound_s: float


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
    except NO_PLAN:
        return None
    summary = solved.summary
    seconds = rank_time(solved.rows, case.program.nodes, summary.step_time_s, case.parallel)
    return Planned(seconds, summary.step_time_s, summary.device_peak_bytes, summary.method, summary.lower_bound_s)


def seconds_of(case: Case, plan: JudgedPlan) -> float:
    """Return the seconds of a plan on the machine of a case."""
    return rank_time(plan.outcome.rows, case.program.nodes, plan.time_s, case.parallel)
