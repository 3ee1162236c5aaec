"""Plans of a real model for several ranks, from tables alone: they fit, overlap, and no fixed policy is faster."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from stowage.flows.planning.costed import Costed, cost_step
from stowage.flows.planning.effort import QUICK, target_device
from stowage.flows.planning.job import Planning, StepToPlan
from stowage.flows.planning.step import plan_costed
from stowage.stages.ir.collectives import GATHER
from stowage.stages.simulate.plan import Outcome, replay_plan
from stowage.stages.solve.collectives.overlap import overlap
from stowage.stages.solve.collectives.policies import gathered_again
from stowage.stages.solve.program.chain import Execution
from stowage.stages.solve.program.of_trace import program_of
from stowage.stages.trace import MicroBatch


class Layers(nn.Module):
    """A stack whose weights are as large as its activations."""

    def __init__(self, depth: int = 5, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(depth)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stores")


@pytest.fixture(scope="module")
def costed(stores: Path) -> Costed:
    """Two ranks; a gather of a layer takes about as long as its forward."""
    model = Layers()
    step = StepToPlan(
        model=model,
        batch=(torch.randn(64, 64),),
        loss=lambda out, batch: out,
        optimizer=torch.optim.AdamW(model.parameters()),
        micro_batch=MicroBatch(ranks=2, bucket_bytes=64 << 10),
    )
    target = replace(target_device("cpu", stores), collective_bytes_per_s=2e9, collective_s=2e-5)
    return cost_step(step, Planning(stores=stores, costs="roofline", target=target))


def policies(costed: Costed, budget: int) -> list[Outcome]:
    """ZeRO-2 and ZeRO-3, prefetched as well as the budget allows."""
    variant = costed.variants[0]
    program = program_of(variant.trace, variant.nodes)
    everything = [Execution(n.node, "keep") for n in variant.nodes]
    found = []
    for executions in (everything, gathered_again(everything, variant.nodes)):
        steps = program.steps(executions)
        outcome = replay_plan(program.storages, program.nodes, steps, keep=program.kept)
        if outcome.peak_bytes <= budget:
            judge = lambda s: replay_plan(program.storages, program.nodes, s, keep=program.kept)  # noqa: E731
            found.append(overlap(steps, outcome, program.nodes, program.nbytes, budget, judge)[1])
    return found


@pytest.mark.parametrize("percent", [100, 80, 60])
def test_a_plan_is_never_slower_than_a_policy(costed: Costed, stores: Path, percent: int) -> None:
    plan = plan_costed(costed, f"{percent}%", Planning(stores=stores, effort=QUICK))
    budget = plan.summary.device_budget_bytes
    assert plan.summary.device_peak_bytes <= budget
    assert any(r.action == "gather" for r in plan.rows), "something is gathered beside computing"
    for other in policies(costed, budget - 128):
        assert plan.summary.step_time_s <= other.time_s * (1 + 1e-9)


def test_a_small_budget_gathers_weights_again(costed: Costed, stores: Path) -> None:
    plan = plan_costed(costed, "60%", Planning(stores=stores, effort=QUICK))
    calls = plan.trace.calls
    gathers = {n.node for n in plan.nodes if any(calls[c].target == GATHER for c in n.calls)}
    runs = [r.node for r in plan.rows if r.node in gathers and r.action in ("compute", "gather")]
    assert len(runs) > len(gathers)
    assert plan.source.count("run.gather(") == len(runs)
    assert plan.source.count("run.gathered(") == len(runs)


def test_the_lower_bound_counts_collectives_beside_computing(costed: Costed, stores: Path) -> None:
    summary = plan_costed(costed, "100%", Planning(stores=stores, effort=QUICK)).summary
    nodes = costed.variants[0].nodes
    computing = sum(n.time_s for n in nodes if not n.collective)
    together = sum(n.time_s for n in nodes if n.collective)
    assert summary.lower_bound_s == pytest.approx(max(computing, together))
    assert summary.lower_bound_s <= summary.step_time_s < computing + together
