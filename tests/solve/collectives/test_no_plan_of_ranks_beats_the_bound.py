"""No plan for several ranks that the referee accepts is faster than the bound by cuts, however slow the links are."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from stowage.flows.planning.costed import Costed, cost_step
from stowage.flows.planning.effort import QUICK
from stowage.flows.planning.job import Planning, StepToPlan
from stowage.flows.planning.step import solve_costed
from stowage.stages.formulations.cuts.step_graph import both_lanes_s
from stowage.stages.ir.errors import Infeasible
from stowage.stages.ir.graph import ComputeNode
from stowage.stages.ir.step import Step
from stowage.stages.simulate.plan import Outcome, replay_plan
from stowage.stages.solve.collectives.overlap import overlap
from stowage.stages.solve.collectives.policies import gathered_again, gradients_whole
from stowage.stages.solve.program.chain import Execution
from stowage.stages.solve.program.of_trace import program_of
from stowage.stages.trace import MicroBatch
from tests.devices import GATHERS_LIKE_FORWARD, made_up_cpu
from tests.matrix import some
from tests.solve.collectives.test_plans_of_ranks import Layers

SAME = 1 + 1e-9


@pytest.fixture(scope="module", params=some([2e9, 5e7], keep=[5e7]), ids=["fast links", "slow links"])
def costed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Costed, Path]:
    """Two ranks; what they exchange takes less than computing, or several times as long."""
    stores = tmp_path_factory.mktemp("stores")
    model = Layers()
    step = StepToPlan(
        model=model,
        batch=(torch.randn(64, 64),),
        loss=lambda out, batch: out,
        optimizer=torch.optim.AdamW(model.parameters()),
        micro_batch=MicroBatch(ranks=2, bucket_bytes=64 << 10),
    )
    target = made_up_cpu(**{**GATHERS_LIKE_FORWARD, "collective_bytes_per_s": request.param})
    return cost_step(step, Planning(stores=stores, costs="roofline", target=target)), stores


def policies(costed: Costed, budget: int) -> Iterator[Outcome]:
    """ZeRO-1, ZeRO-2 and ZeRO-3, prefetched, and with some collectives left in the order of what computes."""
    variant = costed.variants[0]
    program = program_of(variant.trace, variant.nodes)
    draw = random.Random(1)

    def judge(steps: Sequence[Step]) -> Outcome:
        return replay_plan(program.storages, program.nodes, steps, keep=program.kept)

    def some(nodes: Sequence[ComputeNode]) -> list[ComputeNode]:
        return [replace(n, collective=n.collective and draw.random() < 0.6) for n in nodes]

    everything = [Execution(n.node, "keep") for n in variant.nodes]
    whole = gradients_whole(everything, variant.nodes)
    for executions in (whole, everything, gathered_again(everything, variant.nodes)):
        steps = program.steps(executions)
        plain = judge(steps)
        for nodes in (variant.nodes, some(variant.nodes), some(variant.nodes)):
            found = overlap(steps, plain, nodes, program.nbytes, budget, judge)[1]
            if found.peak_bytes <= budget:
                yield found


def test_no_plan_beats_the_bound(costed: tuple[Costed, Path]) -> None:
    """Every method at several budgets, and policies; none of our plans is slower with cuts than without."""
    step, stores = costed
    how = Planning(stores=stores, effort=QUICK)
    above_once = 0
    for percent in (100, 70, 60, 55):
        budget = step.eager_peak_bytes * percent // 100
        try:
            before = solve_costed(step, budget, how)[0].summary
        except Infeasible:
            continue
        after = solve_costed(step, budget, how, cut_seconds=10.0)[0].summary
        assert after.bound_s <= after.step_time_s <= before.step_time_s * SAME
        assert after.device_peak_bytes <= after.device_budget_bytes
        assert after.bound_kind == ("cuts" if after.bound_cuts else "once")
        times = [o.time_s for o in policies(step, after.device_budget_bytes)]
        for method in ("rotor", "recompute_all", "keep_all"):
            try:
                times.append(solve_costed(step, budget, replace(how, method=method))[0].summary.step_time_s)
            except Infeasible:
                continue
        assert all(time_s * SAME >= after.bound_s for time_s in times)
        nodes = step.variants[0].nodes
        lanes = [sum(n.time_s for n in nodes if n.collective is lane) for lane in (False, True)]
        assert after.bound_s * SAME >= min(both_lanes_s(*lanes), after.step_time_s)
        above_once += bool(after.bound_cuts)
    assert above_once
