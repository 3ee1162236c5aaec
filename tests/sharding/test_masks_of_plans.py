"""Plans of a real model for several ranks, from tables alone: under every mask they take what was solved for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stowage.flows.planning.costed import Costed, cost_step
from stowage.flows.planning.effort import QUICK
from stowage.flows.planning.freezing import Freezing
from stowage.flows.planning.job import Planning, StepToPlan
from stowage.flows.planning.planned import Planned
from stowage.flows.planning.step import plan_costed
from stowage.stages.freezing.levels import levels_of
from stowage.stages.freezing.policies import policy_named
from stowage.stages.freezing.projection import Guarded
from stowage.stages.freezing.stored import guarded_plan, replayed_tier
from stowage.stages.freezing.units import units_of
from stowage.stages.ir.actions import STARTS
from stowage.stages.ir.collectives import GATHER, SCATTER, scattered
from stowage.stages.ir.errors import PlanMismatchError
from stowage.stages.ir.machine import Link
from stowage.stages.ir.units import mask_of
from stowage.stages.solve import LowerTier
from stowage.stages.trace import MicroBatch, trace_step
from tests.devices import GATHERS_LIKE_FORWARD, made_up_cpu
from tests.freezing.frozen import masks
from tests.solve.collectives.test_plans_of_ranks import Layers
from tests.zoo import ZOO

NAMES = frozenset(name for name, _ in Layers().named_parameters())
MICRO_BATCHES = {
    "alone": MicroBatch(ranks=2, bucket_bytes=64 << 10, units="saving"),
    "clipped": MicroBatch(max_grad_norm=1.0, ranks=2, bucket_bytes=64 << 10, units="saving"),
    "first": MicroBatch(update=False, ranks=2, bucket_bytes=64 << 10, units="saving"),
    "last": MicroBatch(NAMES, max_grad_norm=1.0, ranks=2, bucket_bytes=64 << 10, units="saving"),
}
SLOW = Link(2e9, 2e9)
TIGHT = {"first": "75%", "last": "80%"}
"""Budgets of micro-batches whose gradients wait, whole."""


def costed(stores: Path, micro_batch: MicroBatch) -> Costed:
    """Two ranks; a gather of a layer takes about as long as its forward."""
    model = Layers()
    step = StepToPlan(
        model=model,
        batch=(torch.randn(64, 64),),
        loss=lambda out, batch: out,
        optimizer=torch.optim.AdamW(model.parameters()),
        micro_batch=micro_batch,
    )
    target = made_up_cpu(**GATHERS_LIKE_FORWARD)
    return cost_step(step, Planning(stores=stores, costs="roofline", target=target))


def frozen(stores: Path, step: Costed, budget: str, **more: Any) -> Planned:
    """A plan in which a fifth of the units trains."""
    freezing = Freezing("saving", 0.8, policy_named("ils", 0.8, 0))
    return plan_costed(step, budget, Planning(stores=stores, effort=QUICK, freeze=freezing, **more))


def check_masks(plan: Guarded, staging_bytes: int = 0) -> None:
    """Compare, for masks of every size, what is solved for with what the referee finds."""
    tier = replayed_tier(
        plan,
        staging_bytes
        + sum(s.nbytes for s in plan.trace.storages if s.role != "temporary" and s.storage not in plan.start.offloaded),
    )
    levels = levels_of(plan, staging_bytes)
    for active in masks(plan.units, 14):
        mask = mask_of(plan.units, active)
        found = plan.under(mask).replay(tier=tier)
        assert found.peak_bytes == max(level.under(mask) for level in levels), active


@pytest.mark.parametrize("budget", ["100%", "tight"])
@pytest.mark.parametrize("kind", MICRO_BATCHES)
def test_every_mask(kind: str, budget: str, tmp_path: Path) -> None:
    percent = TIGHT.get(kind, "60%") if budget == "tight" else budget
    plan = frozen(tmp_path, costed(tmp_path, MICRO_BATCHES[kind]), percent)
    assert plan.summary.device_peak_bytes <= plan.summary.device_budget_bytes
    assert plan.summary.lower_bound_s <= plan.summary.step_time_s
    guarded = guarded_plan(plan.trace, plan.nodes, plan.rows, plan.slots, plan.units)
    check_masks(guarded)
    started = [row for row in plan.rows if row.action in STARTS]
    assert any(row.action == "gather" for row in started)
    if kind == "alone" and budget == "100%":
        assert any(row.action == "scatter" for row in started)
    for row in started:
        guard = guarded.guards.rows[row.row]
        end = next(r.row for r in plan.rows[row.row :] if r.action == "wait" and r.storage == row.storage)
        assert guarded.guards.rows[end] == guard


def test_shards_that_are_offloaded(tmp_path: Path) -> None:
    lower = LowerTier(SLOW, 1 << 40, smallest_bytes=1 << 10, placement="disk")
    plan = frozen(tmp_path, costed(tmp_path, MICRO_BATCHES["alone"]), "45%", lower_tier=lower)
    assert plan.summary.reload_bytes
    assert plan.summary.device_peak_bytes <= plan.summary.device_budget_bytes
    check_masks(guarded_plan(plan.trace, plan.nodes, plan.rows, plan.slots, plan.units))


def _traced(name: str, ranks: int, units: Any) -> Any:
    model, batch, loss = ZOO[name]()
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    return trace_step(model, batch, loss=loss, optimizer=optimizer, micro_batch=MicroBatch(ranks=ranks, units=units))


@pytest.mark.parametrize("kind", ["saving", "parameter", "block"])
@pytest.mark.parametrize("name", ["gpt2", "bert", "resnet", "tied"])
def test_ranks_have_the_units_of_one_process(name: str, kind: Any) -> None:
    """So a checkpoint of either is one of the other; and gradients of two units are never exchanged together."""
    trace = _traced(name, 2, kind)
    units = units_of(trace, kind)
    assert units == units_of(_traced(name, 1, None), kind)
    of = {parameter: unit.name for unit in units for parameter in unit.parameters}
    buckets = [scattered(call.arguments) for call in trace.calls if call.target == SCATTER]
    assert buckets
    assert all(len({of.get(name) for name in bucket}) == 1 for bucket in buckets)
    assert any(call.target == GATHER for call in trace.calls)


def test_units_that_are_exchanged_together(tmp_path: Path) -> None:
    """As in a pipeline, where nobody knows yet what is frozen: what one of them needs is computed for all."""
    micro_batch = replace(MICRO_BATCHES["alone"], units=None)
    plan = frozen(tmp_path, costed(tmp_path, micro_batch), "100%")
    of = {parameter: unit.name for unit in plan.units for parameter in unit.parameters}
    buckets = [scattered(call.arguments) for call in plan.trace.calls if call.target == SCATTER]
    assert any(len({of[name] for name in bucket}) > 1 for bucket in buckets)
    check_masks(guarded_plan(plan.trace, plan.nodes, plan.rows, plan.slots, plan.units))


def test_gradients_of_units_that_wait_are_not_exchanged_together(tmp_path: Path) -> None:
    with pytest.raises(PlanMismatchError, match="together, and they wait and are frozen apart"):
        frozen(tmp_path, costed(tmp_path, replace(MICRO_BATCHES["last"], units=None)), "100%")
