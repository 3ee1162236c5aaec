"""Whole tensors: the replay accepts every plan, memory stays within what fractions took, and little time is lost."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stowage.stages.formulations.offload.o_ilp.answers import OIlpSolution
from stowage.stages.formulations.offload.o_ilp.model import OIlpLimits
from stowage.stages.formulations.offload.o_ilp.solve import o_ilp
from stowage.stages.formulations.offload.problem import OffloadMachine, OffloadProblem
from stowage.stages.formulations.offload.rounding.rounding import RoundedPlan, round_o_ilp
from stowage.stages.formulations.offload.rounding.subset_sum import select_at_least, select_at_most
from stowage.stages.ir.machine import Link
from stowage.stages.solver.outcome import SolverSettings
from tests.formulations.offload.offload_problems import GB, GIB, llama, problems, rtx3060
from tests.formulations.offload.offload_replay import Replay
from tests.matrix import examples

EXACT = SolverSettings(time_limit_s=600.0)
ROUGH = SolverSettings(time_limit_s=600.0, gap=0.01)
NEAR = OIlpLimits(reach=8)


def solved(problem: OffloadProblem, limits: OIlpLimits = NEAR) -> OIlpSolution:
    """The fractional plan."""
    solution = o_ilp(problem, ROUGH, limits=limits).solution
    assert solution is not None
    return solution


def checked(
    problem: OffloadProblem, solution: OIlpSolution, *, smoothed: bool, reach: int | None = None
) -> RoundedPlan:
    """A rounded plan that the replay accepts, within the budget."""
    plan = round_o_ilp(problem, solution, EXACT, smoothed=smoothed, reach=reach)
    Replay(problem, plan)
    # The solver's rows hold within a millionth.
    assert max(plan.memory_bytes) <= problem.machine.device_bytes * (1 + 2e-6) + 1
    return plan


@settings(max_examples=examples(25), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(problems())
def test_small_problems(problem: OffloadProblem) -> None:
    answer = o_ilp(problem, EXACT)
    if answer.solution is None:
        return
    rounded = checked(problem, answer.solution, smoothed=False)
    smooth = checked(problem, answer.solution, smoothed=True)
    assert smooth.objective_s <= rounded.objective_s * (1 + 1e-3)
    # A group here has one to three tensors, of which any may be nearly all of it: at worst every transfer that the
    # fractions hide shows, and updates on the CPU that they cut into pieces.
    assert smooth.objective_s <= 3 * answer.solution.objective_s + 1e-6


LLAMAS = {
    "all": {},
    "no updates on the CPU": {"alpha_c": 0.0},
    "no activation offload": {"activation_offload": False},
    "half blocks": {"halves": True},
    "bf16 with master weights": {"itemsize": 2, "states": 6},
    "SGD": {"states": 0},
}


@pytest.mark.parametrize("name", LLAMAS)
def test_llama_loses_little(name: str) -> None:
    machine = rtx3060(8 * GIB if name == "bf16 with master weights" else 10 * GIB)
    problem = llama(machine, (4096, 11008, 12, 32000, 4096), **LLAMAS[name])  # type: ignore[arg-type]
    solution = solved(problem)
    smooth = checked(problem, solution, smoothed=True, reach=8)
    assert smooth.objective_s <= 1.05 * solution.objective_s
    assert smooth.host_bytes <= machine.host_bytes


def test_without_smoothing_no_step_takes_more_than_the_fractions() -> None:
    """Whole updates on the CPU are given, so that O-ILP solved again has the fractions that are rounded."""
    problem = llama(rtx3060(), (4096, 11008, 8, 32000, 4096), alpha_c=0.0)
    solution = solved(problem)
    plan = checked(problem, solution, smoothed=False, reach=8)
    fixed = OIlpLimits(options=solution.options, cpu_fractions=(0.0,) * len(problem.groups), relaxed=True, reach=8)
    again = o_ilp(problem, EXACT, limits=fixed).solution
    assert again is not None
    for t in range(problem.steps):
        allowed = moving = 0.0
        for group, f in zip(problem.groups, again.groups):
            allowed += group.nbytes * (f.stored[t] + f.reloaded[t] + f.waiting[t])
            allowed += group.state_bytes * (f.states_stored[t] + f.states_reloaded[t])
            moving += group.nbytes + group.state_bytes
        b = problem.block_of(t)
        chosen = [block.options[o] for block, o in zip(problem.blocks, plan.options)]
        peak = chosen[b].forward_peak_bytes if t < problem.L else chosen[b].backward_peak_bytes
        still = sum(o.save_bytes for o in chosen[:b]) + peak + sum(g.pinned_bytes for g in problem.groups)
        assert plan.memory_bytes[t] <= allowed + still + 3e-6 * moving


def test_barred_tensors_are_not_updated_on_the_cpu() -> None:
    problem = llama(rtx3060(), (4096, 11008, 8, 32000, 4096), alpha_c=1.1 * GB)
    solution = solved(problem)
    free = round_o_ilp(problem, solution, EXACT, reach=8)
    assert len(free.on_cpu) >= 3
    barred = frozenset(sorted(free.on_cpu)[::2])
    plan = round_o_ilp(problem, solution, EXACT, reach=8, barred=barred)
    assert plan.on_cpu
    assert not plan.on_cpu & barred


def test_room_in_the_host_is_respected() -> None:
    shape = (4096, 11008, 8, 32000, 4096)
    problem = llama(rtx3060(), shape)
    free = checked(problem, solved(problem), smoothed=True, reach=8)
    tight = replace(problem, machine=replace(problem.machine, host_bytes=int(free.host_bytes * 0.97)))
    plan = checked(tight, solved(tight), smoothed=True, reach=8)
    assert plan.host_bytes <= tight.machine.host_bytes


def test_what_the_host_cannot_hold_goes_to_the_disk() -> None:
    machine = replace(rtx3060(host_bytes=12 * GB), disk=Link(2 * GB, 3 * GB, 4 * GB), disk_bytes=100 * GB)
    problem = llama(machine, (4096, 11008, 6, 32000, 4096), alpha_c=1.1 * GB)
    plan = checked(problem, solved(problem), smoothed=True, reach=8)
    assert plan.on_disk
    assert plan.disk_bytes > 0


def test_equal_inputs_give_an_equal_plan() -> None:
    problem = llama(rtx3060(), (4096, 11008, 6, 32000, 4096))
    solution = solved(problem)
    assert round_o_ilp(problem, solution, EXACT, reach=8) == round_o_ilp(problem, solution, EXACT, reach=8)


@settings(max_examples=examples(100), deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 40), max_size=9), st.integers(-3, 200))
def test_select_is_exact(sizes: list[int], value: int) -> None:
    named = dict(enumerate(sizes))
    totals = {sum(c) for n in range(len(sizes) + 1) for c in itertools.combinations(sizes, n)}
    enough = [t for t in totals if t >= value]
    chosen = select_at_least(named, value)
    assert len(set(chosen)) == len(chosen)
    assert sum(named[i] for i in chosen) == (min(enough) if enough else sum(sizes))
    fitting = [t for t in totals if t <= value]
    assert sum(named[i] for i in select_at_most(named, value)) == (max(fitting) if fitting else 0)


def test_select_among_very_many_different_sizes_still_reaches_the_value() -> None:
    named = {i: 10**6 + 7919 * i * i % 999983 for i in range(60)}
    total = sum(named.values())
    for share in (0.1, 0.5, 0.9):
        reached = sum(named[i] for i in select_at_least(named, int(share * total)))
        assert share * total - 1 <= reached <= share * total * 1.02


def test_a_cpu_only_machine_updates_nothing_beside() -> None:
    machine = OffloadMachine(10 * GIB, Link(GB, GB, 1.3 * GB))
    problem = llama(machine, (4096, 11008, 6, 32000, 4096), alpha_c=0.0, flops=2e11)
    solution = solved(problem)
    assert all(f.on_cpu == 0 for f in solution.groups)
    plan = checked(problem, solution, smoothed=True, reach=8)
    assert not plan.on_cpu
    assert math.isfinite(plan.objective_s)
