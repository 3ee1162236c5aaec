"""Judges plans that come from a file, those that freeze too: what is stored must be what the plan does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from stowage.stages.freezing.guards import guards_of
from stowage.stages.freezing.projection import Guarded
from stowage.stages.ir.errors import IllegalPlanError
from stowage.stages.ir.freezable import Freezable
from stowage.stages.ir.graph import ComputeNode
from stowage.stages.ir.plan import PlanRow, PlanSummary, Slot, plan_hash, tier_state
from stowage.stages.ir.step import Step
from stowage.stages.ir.trace import TraceTables
from stowage.stages.ir.units import Unit, mask_of
from stowage.stages.simulate.lower_tier import ReplayedTier
from stowage.stages.simulate.plan import baseline_bytes
from stowage.stages.simulate.stored import check_stored


def check_plan(
    trace: TraceTables,
    nodes: Sequence[ComputeNode],
    rows: Sequence[PlanRow],
    slots: Sequence[Slot],
    summary: PlanSummary,
    units: Sequence[Unit] = (),
) -> None:
    """Replay a stored plan, and compare what it does with what it states.

    A plan that freezes is replayed with everything training, and under the mask that it names as the worst.

    Raises:
        IllegalPlanError: it is not legal, or not what its summary, its slots and its units say.
    """
    if not units and not summary.units:
        check_stored(trace, nodes, rows, slots, summary)
        return
    freezable = Freezable(tuple(units), summary.active_units)
    configuration, whole = trace.meta.configuration_hash, summary.all_active_bytes
    if len(units) != summary.units or summary.plan_hash != plan_hash(
        rows, configuration, summary.device_budget_bytes, repr(freezable)
    ):
        raise IllegalPlanError("a stored plan is of another program, or freezes other units, than its summary says")
    training = replace(
        summary,
        device_budget_bytes=whole,
        device_peak_bytes=whole,
        plan_hash=plan_hash(rows, configuration, whole),
    )
    check_stored(trace, nodes, rows, slots, training)
    plan = guarded_plan(trace, nodes, rows, slots, units)
    mask = mask_of(units, summary.worst_units)
    found = plan.under(mask).replay(summary.device_budget_bytes, replayed_tier(plan, summary.baseline_bytes))
    if found.peak_bytes != summary.device_peak_bytes:
        raise IllegalPlanError("a stored plan takes other memory under its worst mask than its summary says")


def guarded_plan(
    trace: TraceTables,
    nodes: Sequence[ComputeNode],
    rows: Sequence[PlanRow],
    slots: Sequence[Slot],
    units: Sequence[Unit],
) -> Guarded:
    """Return the plan of some rows with its guards."""
    steps = [Step.of(row) for row in rows]
    return Guarded(trace, nodes, steps, units, guards_of(trace, nodes, steps, units), tier_state(slots))


def replayed_tier(plan: Guarded, baseline: int) -> ReplayedTier:
    """Return a lower tier in which copies take no time, for a plan with so many bytes on the device between steps."""
    offloaded = sum(plan.trace.storages[s].nbytes for s in plan.start.offloaded)
    return ReplayedTier(
        staging_bytes=baseline - (baseline_bytes(plan.trace.storages) - offloaded),
        cpu_update_s={n.node: 0.0 for n in plan.nodes if n.phase == "update"},
    )
