"""Judges plans that come from a file: what is stored must be what the plan does."""

from __future__ import annotations

from collections.abc import Sequence

from stowage.stages.ir.errors import IllegalPlanError
from stowage.stages.ir.graph import ComputeNode
from stowage.stages.ir.plan import PlanRow, PlanSummary, Slot, plan_hash, tier_state
from stowage.stages.ir.step import Step
from stowage.stages.ir.trace import TraceTables
from stowage.stages.ir.updates import left_behind, taken_gradients
from stowage.stages.simulate.lower_tier import ReplayedTier
from stowage.stages.simulate.plan import Outcome, baseline_bytes, replay_plan
from stowage.stages.simulate.slots import slots_of


def kept_storages(trace: TraceTables) -> frozenset[int]:
    """Return the storages that must exist when a step ends: see `keep` of `replay_plan`."""
    storage_of = [v.storage for v in trace.values]
    waiting = {s.storage for s in trace.storages if s.role == "gradient"}
    consumed = {storage_of[v] for v in taken_gradients(trace.calls)}
    return frozenset({storage_of[v] for v in left_behind(trace)} | waiting - consumed)


def check_stored(
    trace: TraceTables,
    nodes: Sequence[ComputeNode],
    rows: Sequence[PlanRow],
    slots: Sequence[Slot],
    summary: PlanSummary,
) -> None:
    """Replay a stored plan, and compare what it does with what it states.

    Times are not compared: they change no number.

    Raises:
        IllegalPlanError: it is not legal, or not what its summary and its slots say.
    """
    try:
        outcome, steps = _replayed(trace, nodes, rows, slots, summary)
    except (IndexError, KeyError, StopIteration) as error:
        raise IllegalPlanError(f"a stored plan names something that its program does not have ({error})") from error
    if [_deed(row) for row in outcome.rows] != [_deed(row) for row in rows]:
        raise IllegalPlanError("a stored plan takes other memory than its rows say")
    stated = (summary.device_peak_bytes, summary.baseline_bytes, summary.lower_tier_bytes, summary.disk_bytes)
    if stated != (outcome.peak_bytes, outcome.baseline_bytes, outcome.lower_tier_bytes, outcome.disk_bytes):
        raise IllegalPlanError("a stored plan takes other memory than its summary says")
    if slots_of(trace, steps, tier_state(slots)) != list(slots):
        raise IllegalPlanError("a stored plan moves other tensors than its slots say")
    named = plan_hash(rows, trace.meta.configuration_hash, summary.device_budget_bytes)
    if (summary.plan_hash, summary.configuration_hash) != (named, trace.meta.configuration_hash):
        raise IllegalPlanError("a stored plan is of another program than its summary says")


def _replayed(
    trace: TraceTables,
    nodes: Sequence[ComputeNode],
    rows: Sequence[PlanRow],
    slots: Sequence[Slot],
    summary: PlanSummary,
) -> tuple[Outcome, list[Step]]:
    if any(min(row.node, row.storage) < -1 for row in rows) or any(s.storage < 0 for s in slots):
        raise IndexError("a negative position")
    start = tier_state(slots)
    steps = [Step(row.node, row.storage, row.step, row.action) for row in rows]
    on_device = baseline_bytes(trace.storages) - sum(trace.storages[s].nbytes for s in start.offloaded)
    staging = summary.baseline_bytes - on_device  # the only thing that the rows do not show
    if staging < 0:
        raise IllegalPlanError("a stored plan takes other memory between iterations than its summary says")
    outcome = replay_plan(
        trace.storages,
        nodes,
        steps,
        keep=kept_storages(trace),
        budget_bytes=summary.device_budget_bytes,
        start=start,
        tier=ReplayedTier(staging_bytes=staging, cpu_update_s={n.node: 0.0 for n in nodes if n.phase == "update"}),
    )
    return outcome, steps


def _deed(row: PlanRow) -> tuple[object, ...]:
    """Return what a row does, without its times."""
    return (
        row.row, row.action, row.node, row.storage, row.block, row.step, row.recompute, row.resident_bytes,
        row.peak_bytes,
    )  # fmt: skip
