"""No plan of ranks that offload is faster than the bound by cuts with transfers; each is an answer of its program."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from stowage.stages.formulations.cuts.step_graph import StepGraph, both_lanes_s
from stowage.stages.formulations.cuts.transfers.below import Below
from stowage.stages.formulations.cuts.transfers.model import build_with_transfers
from stowage.stages.formulations.sharding.fixed import fixed_policies
from stowage.stages.ir.machine import TierState
from stowage.stages.ir.plan import tier_state
from stowage.stages.ir.step import Step as Row
from stowage.stages.simulate.lower_tier import ReplayedTier
from stowage.stages.solve import solve_variants
from stowage.stages.solve.cuts.transfers import TransferWay
from stowage.stages.solve.offload.cpu_updates import UpdatesOnCpu
from stowage.stages.solver.milp import solve_milp
from stowage.stages.solver.outcome import SolverSettings
from tests.matrix import some
from tests.solve.collectives.rank_steps import Rates, Step
from tests.solve.cuts.plan_as_answer import fix, mean_times

SAME = 1 + 1e-9

MACHINES = {
    "equal": (1e9, Rates(1e9, 1e10)),
    "slow collectives": (5e7, Rates(1e9, 1e10)),
    "slow copies": (1e10, Rates(1e8, 1e11)),
    "one link": (1e9, Rates(5e8, 1e11, shared=True)),
}


def plans(step: Step, budget: int) -> Iterator[tuple[str, list[Row], TierState]]:
    """Yield what planning chooses, and every fixed policy whose plan fits, hidden beside computing."""
    solved = solve_variants(step.costed.variants[:1], step.options, step.request(budget))
    yield "ours", [Row.of(r) for r in solved.rows], tier_state(solved.slots)
    for name, choice in fixed_policies(step.table(budget).problem).items():
        judged = step.judged(budget, choice)
        if judged.peak_bytes <= budget:
            yield name, list(judged.steps), judged.state


@pytest.mark.parametrize("machine", some(MACHINES, keep=["slow copies"]))
@pytest.mark.parametrize(("family", "ranks"), some([("llama", 4), ("gpt2", 2)], keep=[("llama", 4)]))
def test_no_plan_beats_the_bound(family: str, ranks: int, machine: str) -> None:
    """At two budgets, with the cuts that planning itself makes."""
    step = Step(family, ranks, *MACHINES[machine])
    variant, tier = step.costed.variants[0], step.tier
    updates = UpdatesOnCpu(step.program, tier)
    seconds = {n.node: updates.seconds(n) for n in variant.nodes if n.phase == "update"}
    graph = StepGraph.of(variant.trace, variant.nodes)
    below = Below.of(variant.trace, graph, tier.link, seconds)
    replayed = ReplayedTier(tier.link, cpu_update_s=seconds)
    least, most = step.peaks()
    above_once, offloading, collectives, closest = 0, 0, 0, math.inf
    for budget in (least + (most - least) // 4, least + (most - least) // 2):
        way = TransferWay(variant, step.program, math.inf, budget, tier)
        for _ in way.improve(time.monotonic() + 5):
            pass
        above_once += way.bound_s > below.once_s(graph) * (1 + 1e-6)
        for name, steps, state in plans(step, budget):
            *times, period_s = mean_times(variant.trace.storages, variant.nodes, steps, state, replayed, way.cuts)
            assert way.bound_s <= period_s * SAME, name
            closest = min(closest, period_s / way.bound_s)
            model = build_with_transfers(graph, way.cuts, budget, below)
            fix(model, steps, state, [*times, period_s])
            assert solve_milp(model.problem, SolverSettings(300.0)).status == "optimal", f"{name} is no answer"
            offloading += any(s.kind == "offload" for s in steps)
            collectives += any(s.kind == "gather" for s in steps)
    assert offloading
    assert collectives
    assert above_once or machine != "slow copies"
    assert closest < 3.0, "half of what the longer lane has, at least"


def test_a_plan_of_ranks_that_offloads_states_its_bound() -> None:
    step = Step("llama", 4, *MACHINES["slow copies"])
    least, most = step.peaks()
    budget = least + (most - least) // 4
    request = step.request(budget)
    before = solve_variants(step.costed.variants[:1], step.options, request)
    after = solve_variants(step.costed.variants[:1], step.options, replace(request, cut_seconds=30.0))
    assert before.rows == after.rows
    s = after.summary
    assert before.summary.bound_s == 0.0
    assert s.bound_kind == ("cuts with transfers" if s.bound_cuts else "once")
    assert 0 < s.bound_s <= s.step_time_s
    assert s.gap == pytest.approx(1 - s.bound_s / s.step_time_s)
    nodes = step.costed.variants[0].nodes
    on_device = [n for n in nodes if n.phase != "update" or n.collective]
    lanes = [sum(n.time_s for n in on_device if n.collective is lane) for lane in (False, True)]
    assert s.bound_s * SAME >= both_lanes_s(*lanes)
