"""Plans which groups of parameters are on the host and which are kept, with the simulator as referee."""

from __future__ import annotations

from collections.abc import Sequence

from stowage.stages.formulations.sharding.problem import ShardingProblem
from stowage.stages.formulations.sharding.race import Judged, RaceResult, race
from stowage.stages.ir.parallel import GroupChoice
from stowage.stages.simulate.parallel.fsdp2 import simulate_fsdp2
from stowage.stages.solver.outcome import SolverSettings

SETTINGS = SolverSettings(time_limit_s=30.0, gap=1e-3)
"""Limits of the exact choice."""


def plan_groups(problem: ShardingProblem, settings: SolverSettings = SETTINGS) -> RaceResult:
    """Return the fastest choice that the simulator of FSDP2 finds within both budgets, and all that took part."""
    return race(problem, lambda choices: judge(problem, choices), settings)


def judge(problem: ShardingProblem, choices: Sequence[GroupChoice]) -> Judged:
    """Simulate one choice."""
    outcome = simulate_fsdp2(
        problem.groups,
        choices,
        problem.machine,
        micro_batches=problem.micro_batches,
        ahead=problem.ahead,
        fixed_bytes=problem.fixed_bytes,
        copies=problem.copies,
        host_is_device=problem.host_is_device,
    )
    return Judged(outcome.time_s, outcome.device_bytes, outcome.host_bytes)
