"""What leaves, by Belady's rule: legal and within the budget on random steps, and against all choices on tiny ones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stowage.stages.ir.machine import Link
from stowage.stages.ir.step import Step
from stowage.stages.ir.trace import TraceTables
from stowage.stages.solve.in_memory import OrderMaker, keep_everything
from stowage.stages.solve.offload.belady.belady import BeladyPlanner, belady_plans
from stowage.stages.solve.offload.belady.late_updates import late_updates
from stowage.stages.solve.offload.offloader import Offloader
from stowage.stages.solve.offload.tier import LowerTier
from stowage.stages.solve.program.chain import Chain, Execution
from stowage.stages.solve.program.of_trace import program_of
from tests.matrix import examples
from tests.offload.with_lower_tier import LOWER_TIER
from tests.runtime.beside_eager import adamw, prepare
from tests.solve.judged import hidden, judged
from tests.solve.prepared import Prepared, prepare_trace
from tests.solve.synthetic_steps import training_steps
from tests.zoo import ZOO

QUICK = {"deadline": None, "derandomize": True, "suppress_health_check": list(HealthCheck)}
TINY = LowerTier(Link(1e3, 1e3), 1 << 40, smallest_bytes=1)


def offloader_of(prepared: Prepared, lower_tier: LowerTier = LOWER_TIER) -> Offloader:
    chain = Chain(prepared.blocks, prepared.nodes, prepared.options)
    return Offloader(program_of(prepared.trace, prepared.nodes), chain, lower_tier)


def executions_of(offloader: Offloader, budget: int = 1 << 60) -> list[Execution]:
    return keep_everything(OrderMaker(offloader.program, offloader.chain, budget)).executions


def computed(steps: Iterable[Step]) -> list[int]:
    return [s.node for s in steps if s.node >= 0]


@settings(max_examples=examples(80), **QUICK)
@given(training_steps(), st.floats(0.0, 1.1), st.booleans())
def test_random_steps(trace: TraceTables, share: float, activations: bool) -> None:
    """Whatever the budget from the least up: plans that the referee accepts, within it, with the same computations."""
    offloader = offloader_of(prepare_trace(trace), replace(TINY, activations=activations, gradients=True))
    executions = executions_of(offloader)
    planner = BeladyPlanner(offloader, executions, frozenset())
    everything = offloader.program.peak_bytes(executions)
    budget = int(planner.least_bytes + share * max(0, everything - planner.least_bytes))
    plans = judged(offloader.program, belady_plans(offloader, executions, budget))
    assert plans, "the referee refuses none of them"
    for plan in plans:
        assert plan.outcome.peak_bytes <= budget
        assert computed(plan.steps) == [e.node for e in executions]
    if budget >= everything:
        assert plans[0].outcome.reload_bytes == plans[0].outcome.offload_bytes == 0


@settings(max_examples=examples(60), **QUICK)
@given(training_steps(), st.floats(0.0, 1.1), st.integers(1, 4))
def test_random_steps_with_updates_by_the_cpu(trace: TraceTables, share: float, every: int) -> None:
    """The same with any updates taken by the CPU: each starts once its gradient is offloaded, and nothing of it is
    computed on the device; it is waited for before its weight is used."""
    offloader = offloader_of(prepare_trace(trace), replace(TINY, cpu_update_bytes_per_s=1e3))
    executions = executions_of(offloader)
    updates = late_updates(offloader, executions)[::every]
    planner = BeladyPlanner(offloader, executions, frozenset(), updates)
    taken = [u.node.node for u in updates]
    budget = planner.least_bytes + int(share * 100)
    plans = judged(offloader.program, belady_plans(offloader, executions, budget, updates=updates))
    assert plans, "the referee refuses none of them"
    for plan in plans:
        assert plan.peak_bytes <= budget
        assert sorted(s.node for s in plan.steps if s.kind == "update") == sorted(taken)
        on_device = [s.node for s in plan.steps if s.kind == "compute"]
        assert on_device == [e.node for e in executions if e.node not in taken]
        assert plan.state.updating == {u.weight for u in updates}
        assert hidden(offloader.program, plan, plan.peak_bytes).time_s <= plan.time_s


@settings(max_examples=examples(40), **QUICK)
@given(training_steps(max_layers=3), st.floats(0.0, 0.9))
def test_against_all_choices(trace: TraceTables, share: float) -> None:
    """The best of the plans copies at most a fifth more than the best of all sets of gaps that fit."""
    offloader = offloader_of(prepare_trace(trace), replace(TINY, activations=False))
    executions = executions_of(offloader)
    planner = BeladyPlanner(offloader, executions, frozenset())
    if len(planner.absences) > 8:
        return
    everything = offloader.program.peak_bytes(executions)
    budget = int(planner.least_bytes + share * max(0, everything - planner.least_bytes))
    sets = (list(c) for n in range(len(planner.absences) + 1) for c in combinations(planner.absences, n))
    every = (planner.proposal(chosen) for chosen in sets)
    fitting = [p for p in judged(offloader.program, every) if p.peak_bytes <= budget]
    best = min(p.moved_bytes for p in fitting)
    found = min(p.moved_bytes for p in judged(offloader.program, belady_plans(offloader, executions, budget)))
    assert best <= found <= 1.2 * best


@pytest.mark.parametrize("name", ["gpt2", "resnet"])
def test_what_is_offloaded_at_rest_in_any_case(name: str) -> None:
    prepared = prepare(ZOO[name], adamw)
    offloader = offloader_of(prepared)
    executions = executions_of(offloader)
    offloaded = frozenset(sorted(offloader.movable)[::3])
    for plan in judged(offloader.program, belady_plans(offloader, executions, 1 << 60, offloaded)):
        assert plan.state.offloaded == offloaded
