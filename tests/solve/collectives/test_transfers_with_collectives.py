"""Collectives take along what they need of the lower tier: reloads before gathers, offloads after scatters."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from stowage.stages.formulations.sharding.fixed import fixed_policies
from stowage.stages.ir.step import Step as Row
from stowage.stages.solve.collectives import overlap
from stowage.stages.solve.collectives.groups import lowered
from stowage.stages.solve.proposal import JudgedPlan
from stowage.stages.solve.referee import Referee
from tests.solve.collectives.rank_steps import Rates, Step

PLENTY = 1 << 50


@pytest.fixture(scope="module")
def step() -> Step:
    """A Llama of two layers on four ranks whose collectives take about as long as computing."""
    return Step("llama", 4, 1e9, Rates(1e9, 1e10))


def offloaded(step: Step) -> JudgedPlan:
    """ZeRO-3 with everything in the host, nothing hidden."""
    choices = fixed_policies(step.table(PLENTY).problem)["ZeRO-3 offloaded"]
    plan = lowered(step.offloader, step.offloader.leanest(), step.table(PLENTY).choice(choices), method="by hand")
    return Referee(step.program, PLENTY).judge(plan)


def work(step: Step, rows: list[Row]) -> Counter[tuple[object, ...]]:
    """What rows do, without waits: a collective does the same in its place and beside computing."""
    nodes = step.program.nodes
    return Counter(
        ("node", r.node) if r.node >= 0 and nodes[r.node].collective else (r.kind, r.node, r.storage)
        for r in rows
        if r.kind != "wait"
    )


def test_shards_are_reloaded_before_gathers_and_leave_after_scatters(step: Step) -> None:
    plan = offloaded(step)
    referee = Referee(step.program, PLENTY)
    hidden = referee.hide(plan)
    assert work(step, hidden.steps) == work(step, plan.steps)
    gathers = [i for i, row in enumerate(hidden.steps) if row.kind == "gather"]
    assert gathers, "no gather runs beside computing"
    names = {s.storage: s.name for s in step.program.storages}
    reloaded = {row.storage for row in hidden.steps if row.kind == "reload"}
    beside = 0
    for i in gathers:
        for shard in reloaded.intersection(step.program.nodes[hidden.steps[i].node].reads):
            before = [r for r in hidden.steps[:i] if r.storage == shard and r.kind in ("reload", "wait", "free")]
            assert [r.kind for r in before[-2:]] == ["reload", "wait"], names[shard]
            beside += 1
    assert beside, "no gather of an offloaded shard runs beside computing"
    scattered = {row.storage: i for i, row in enumerate(hidden.steps) if row.kind == "scatter"}
    left = {row.storage: i for i, row in enumerate(hidden.steps) if row.kind == "offload" and row.storage in scattered}
    assert left, "no scatter whose shard is offloaded runs beside computing"
    for storage, i in left.items():
        between = hidden.steps[scattered[storage] : i]
        assert any(r.kind == "wait" and r.storage == storage for r in between), names[storage]


def test_that_is_faster_than_moving_collectives_alone(step: Step, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = offloaded(step)
    together = Referee(step.program, PLENTY).hide(plan)
    monkeypatch.setattr(overlap, "MOVES", overlap.MOVES[1:])
    alone = Referee(step.program, PLENTY).hide(plan)
    assert together.time_s < 0.95 * alone.time_s


@pytest.mark.parametrize("share", [0.0, 0.1, 0.3, 1.0])
def test_within_any_budget_the_same_work_is_never_slower(step: Step, share: float) -> None:
    plan = offloaded(step)
    budget = int(plan.peak_bytes * (1 + share))
    hidden = Referee(step.program, budget).hide(replace(plan))
    assert hidden.peak_bytes <= budget
    assert hidden.time_s <= plan.time_s * (1 + 1e-9)
    assert work(step, hidden.steps) == work(step, plan.steps)
