"""Runs the six planning stages in one process, with the same functions and stores as the pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stowage.flows.planning.costed import Costed, Part, Progress, block_options, cost_step, cost_traces
from stowage.flows.planning.effort import QUICK, Effort, processor_s, stores_folder, target_device
from stowage.flows.planning.plan_store import PlanStore
from stowage.flows.planning.planned import Planned, finish, write_plan
from stowage.stages.ir.costs import DeviceDescription
from stowage.stages.ir.plan import Option
from stowage.stages.optimizers import KnownOptimizer
from stowage.stages.rewrite import needed_variant
from stowage.stages.settings.sizes import resolve_budget
from stowage.stages.solve import Known, LowerTier, PlanRequest, Reserve, Solved, check_method, solve_variants
from stowage.stages.trace import MicroBatch, Recorded
from stowage.stages.workload.calls import Loss, Objective

__all__ = [
    "QUICK",
    "Costed",
    "Effort",
    "Planned",
    "block_options",
    "cost_step",
    "cost_traces",
    "finish",
    "plan_costed",
    "plan_step",
    "processor_s",
    "solve_costed",
    "stores_folder",
    "target_device",
    "write_plan",
]


def plan_step(
    model: nn.Module,
    batch: Any,
    *,
    loss: Loss | None,
    optimizer: torch.optim.Optimizer | KnownOptimizer | None,
    device_budget: str | int,
    method: str,
    stores: Path,
    objective: Objective | None = None,
    recorded: Recorded | None = None,
    micro_batch: MicroBatch | None = None,
    largest: MicroBatch | None = None,
    costs: str = "measured",
    effort: Effort | None = None,
    notices: list[str] | None = None,
    target: DeviceDescription | None = None,
    lower_tier: LowerTier | None = None,
    offloaded_at_rest: frozenset[str] = frozenset(),
    layouts: Mapping[str, torch.Tensor] | None = None,
    progress: Progress = lambda stage: None,
) -> Planned:
    """Plan one model and batch: trace, profile, partition, options, solve, codegen.

    Args:
        model: see `fit`.
        batch: see `fit`.
        loss: see `fit`.
        optimizer: has the model's parameters.
        device_budget: see `fit`.
        method: see `fit`.
        stores: folder of the stores.
        objective: `objective(model, batch)`, instead of `loss`, for those who call the model themselves.
        recorded: forward and backward of this batch, if traced before.
        micro_batch: what happens to gradients; by default they go into updates at once.
        largest: the micro-batch whose peak in plain PyTorch a budget in percent is of; by default `micro_batch`.
        costs: `measured` or `roofline`.
        effort: how much time planning may take.
        notices: receives what the user should know.
        target: the device; by default this machine's.
        lower_tier: the lower tier, if the plan may use one.
        offloaded_at_rest: see `PlanRequest`.
        layouts: layouts of parameters that are not in memory, see `trace_step`.
        progress: called with each stage's name as it starts.

    Raises:
        StowageError: see the stages; `Infeasible` when the budget cannot be met.
    """
    check_method(method)
    effort = effort or Effort()
    costed = cost_step(
        model,
        batch,
        loss=loss,
        optimizer=optimizer,
        stores=stores,
        objective=objective,
        recorded=recorded,
        micro_batch=micro_batch,
        largest=largest,
        costs=costs,
        effort=effort,
        notices=notices,
        target=target,
        layouts=layouts,
        progress=progress,
    )
    return plan_costed(
        costed,
        device_budget=device_budget,
        method=method,
        stores=stores,
        effort=effort,
        lower_tier=lower_tier,
        offloaded_at_rest=offloaded_at_rest,
        progress=progress,
    )


def plan_costed(
    costed: Costed,
    *,
    device_budget: str | int,
    method: str,
    stores: Path,
    effort: Effort,
    lower_tier: LowerTier | None = None,
    offloaded_at_rest: frozenset[str] = frozenset(),
    progress: Progress = lambda stage: None,
    part: Part = lambda done, total: None,
    said: str = "",
    known: Known | None = None,
) -> Planned:
    """Plan from tables alone: no model, and no device that could run it.

    Args:
        costed: the step; `cost_traces` makes it from tables.
        device_budget: see `plan_step`.
        method: see `plan_step`.
        stores: see `plan_step`.
        effort: see `plan_step`.
        lower_tier: see `plan_step`.
        offloaded_at_rest: see `plan_step`.
        progress: see `plan_step`.
        part: called with the blocks that have schedules, and how many there are.
        said: how the budget was found, if it was not given in bytes.
        known: see `solve_costed`.

    Raises:
        StowageError: see the stages; `Infeasible` when the budget cannot be met.
    """
    budget_bytes = resolve_budget(device_budget, costed.eager_peak_bytes, "device_budget")
    solved, options = solve_costed(
        costed,
        budget_bytes,
        method=method,
        stores=stores,
        effort=effort,
        lower_tier=lower_tier,
        offloaded_at_rest=offloaded_at_rest,
        progress=progress,
        part=part,
        said=said,
        known=known,
    )
    progress("codegen")
    chosen = needed_variant(costed.variants_for(method), solved.summary.variant)
    trace, nodes, blocks = chosen.trace, list(chosen.nodes), list(chosen.blocks)
    return finish(trace, nodes, blocks, options, solved, stores, costed.eager_peak_bytes)


def solve_costed(
    costed: Costed,
    budget_bytes: int,
    *,
    method: str,
    stores: Path,
    effort: Effort,
    lower_tier: LowerTier | None = None,
    offloaded_at_rest: frozenset[str] = frozenset(),
    progress: Progress = lambda stage: None,
    part: Part = lambda done, total: None,
    said: str = "",
    known: Known | None = None,
) -> tuple[Solved, list[Option]]:
    """Return the plan within a budget, from the store or solved now, without its program.

    Args:
        costed: the step.
        budget_bytes: the device budget.
        method: see `plan_step`.
        stores: see `plan_step`.
        effort: see `plan_step`.
        lower_tier: see `plan_step`.
        offloaded_at_rest: see `plan_step`.
        progress: see `plan_step`.
        part: see `plan_costed`.
        said: see `plan_costed`.
        known: what plans of the same step, method and effort within other budgets have found.

    Returns:
        The plan, and the options that it was chosen from; none where it was in the store.

    Raises:
        StowageError: see the stages; `Infeasible` when the budget cannot be met.
    """
    target, variants = costed.target, costed.variants_for(method)
    reserve = Reserve(target, budget_bytes, variants[0].trace, said)
    budget = reserve.usable_bytes
    store = PlanStore(stores / "solved")
    lasting = lower_tier.lasting() if lower_tier else None
    limits = effort.grid, effort.solver, effort.o_ilp, effort.o_ilp_searches, effort.slots
    key = store.key(variants, budget, method, limits, target, lasting, sorted(offloaded_at_rest))
    room_bytes = lower_tier.disk_room_bytes if lower_tier else None
    solved = store.find(key, variants, budget_bytes=budget, disk_room_bytes=room_bytes)
    if solved is not None:
        return reserve.stated(solved), []
    progress("options")
    options = costed.options_for(method, stores, effort, part)
    progress("solve")
    request = PlanRequest(
        device_budget_bytes=budget,
        method=method,
        slots=effort.slots,
        device=target.name,
        device_fingerprint=target.fingerprint,
        options_limits=effort.solver,
        o_ilp_limits=effort.o_ilp,
        o_ilp_searches=effort.o_ilp_searches,
        lower_tier=lower_tier,
        offloaded_at_rest=offloaded_at_rest,
    )
    with reserve.counted():
        solved = reserve.stated(solve_variants(variants, options, request, known))
    store.add(key, solved)
    return solved, options
