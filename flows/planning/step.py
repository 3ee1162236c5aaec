"""Runs the six planning stages in one process, with the same functions and stores as the pipeline."""

from __future__ import annotations

import time
from dataclasses import replace

from stowage.flows.planning.costed import Costed, block_options, cost_step, cost_traces
from stowage.flows.planning.effort import QUICK, Effort, processor_s, stores_folder, target_device
from stowage.flows.planning.job import Costing, Planning, StepToPlan
from stowage.flows.planning.plan_store import PlanStore
from stowage.flows.planning.planned import Planned, finish, write_plan
from stowage.stages.ir.defaults import METHOD
from stowage.stages.ir.errors import NO_PLAN, Infeasible, NoRoomInLowerTier
from stowage.stages.ir.plan import Option
from stowage.stages.rewrite import needed_variant
from stowage.stages.settings.sizes import resolve_budget
from stowage.stages.solve import Known, Reserve, Solved, check_method, solve_variants
from stowage.stages.solve.cuts.frozen_bound import frozen_bound
from stowage.stages.solve.cuts.proven import seconds_for_cuts
from stowage.stages.solve.frozen_ways import solve_frozen_ways
from stowage.stages.solve.variants import preferred

__all__ = [
    "QUICK",
    "Costed",
    "Costing",
    "Effort",
    "Planned",
    "Planning",
    "StepToPlan",
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


def plan_step(step: StepToPlan, device_budget: str | int, how: Planning) -> Planned:
    """Plan one model and batch: trace, profile, partition, options, solve, codegen.

    Args:
        step: the model, its batch, and what happens to its gradients.
        device_budget: see `fit`.
        how: with which method and effort, and what for.

    Raises:
        StowageError: see the stages; `Infeasible` when the budget cannot be met.
    """
    check_method(how.method)
    since_s = time.monotonic()
    return plan_costed(cost_step(step, how), device_budget, how, since_s=since_s)


def plan_costed(
    costed: Costed,
    device_budget: str | int,
    how: Planning,
    *,
    said: str = "",
    known: Known | None = None,
    since_s: float | None = None,
) -> Planned:
    """Plan from tables alone: no model, and no device that could run it.

    Args:
        costed: the step; `cost_traces` makes it from tables.
        device_budget: see `fit`.
        how: with which method and effort.
        said: how the budget was found, if it was not given in bytes.
        known: see `solve_costed`.
        since_s: when planning began, on the clock of `time.monotonic`; now by default. Cuts take a share of the time.

    Raises:
        StowageError: see the stages; `Infeasible` when the budget cannot be met.
    """
    since_s = time.monotonic() if since_s is None else since_s
    budget_bytes = resolve_budget(device_budget, costed.eager_peak_bytes, "device_budget")
    solved, options = solve_costed(
        costed, budget_bytes, how, said=said, known=known, cut_seconds=how.effort.cut_seconds, since_s=since_s
    )
    how.progress("codegen")
    chosen = needed_variant(costed.variants_for(how.method), solved.summary.variant)
    trace, nodes, blocks = chosen.trace, list(chosen.nodes), list(chosen.blocks)
    return finish(trace, nodes, blocks, options, solved, how.stores, costed.eager_peak_bytes)


def solve_costed(
    costed: Costed,
    budget_bytes: int,
    how: Planning,
    *,
    said: str = "",
    known: Known | None = None,
    cut_seconds: float = 0.0,
    since_s: float | None = None,
) -> tuple[Solved, list[Option]]:
    """Return the plan within a budget, from the store or solved now, without its program.

    Args:
        costed: the step.
        budget_bytes: the device budget.
        how: with which method and effort.
        said: see `plan_costed`.
        known: what plans of the same step, options and method within other budgets have found.
        cut_seconds: see `PlanRequest`; 0 for plans that a search only looks at.
        since_s: see `PlanRequest.planning_since_s`.

    Returns:
        The plan, and the options that it was chosen from; none where it was in the store.

    Raises:
        StowageError: see the stages; `Infeasible` when the budget cannot be met.
    """
    method, effort, lower_tier = how.method, how.effort, how.lower_tier
    target, variants = costed.target, costed.variants_for(method)
    reserve = Reserve(target, budget_bytes, variants[0].trace, said)
    budget = reserve.usable_bytes
    store = PlanStore(how.stores / "solved")
    lasting = lower_tier.lasting() if lower_tier else None
    efforts = (
        effort.o_ilp_searches,
        effort.slots,
        effort.eviction_rules,
        effort.rules_suffice,
        effort.few_blocks,
        cut_seconds,
    )
    limits = effort.grid, effort.solver, effort.o_ilp, efforts
    freezable = how.freeze.freezable(variants[0].trace) if how.freeze is not None else None
    frozen = (freezable,) if freezable is not None else ()
    leave = ("lossy", costed.max_gradient_error, tuple(costed.errors)) if how.lossy else ()
    key = store.key(variants, budget, method, limits, target, lasting, sorted(how.offloaded_at_rest), *frozen, *leave)
    room_bytes = lower_tier.disk_room_bytes if lower_tier else None
    solved = store.find(key, variants, budget_bytes=budget, disk_room_bytes=room_bytes)
    if solved is not None:
        return reserve.stated(solved), []
    known = known or Known()

    def fastest(options: list[Option], known: Known) -> Solved:
        """Return the plan made of these schedules of blocks, and of what needs none."""
        how.progress("solve")

        def solve(nbytes: int, rewrite: str = "") -> Solved:
            request = replace(
                how.request(nbytes, target),
                errors=costed.errors,
                max_gradient_error=costed.max_gradient_error,
                cut_seconds=cut_seconds if freezable is None else 0.0,
                planning_since_s=since_s,
                rewrite=rewrite,
                enough=effort.rules_suffice if freezable is not None else 0.0,
            )
            return solve_variants(variants, options, request, known)

        if freezable is None:
            return solve(budget)
        found = solve_frozen_ways(solve, variants, freezable, budget, lower_tier, effort.rules_suffice)
        seconds = seconds_for_cuts(cut_seconds, since_s, time.monotonic())
        guide, offloads = needed_variant(variants, found.summary.variant), lower_tier is not None
        return frozen_bound(found, guide, variants, freezable, seconds, offloads=offloads)

    with reserve.counted():
        solved, options = None, list[Option]()
        lacking: list[Infeasible | NoRoomInLowerTier] = []
        distinct = {b.block_hash for v in variants for b in v.blocks}

        def by_rules() -> None:
            nonlocal solved, options
            options = costed.fixed_options_for(method)
            try:
                solved = fastest(options, known.part("fixed policies"))
            except NO_PLAN as failure:
                lacking.append(failure)

        if method == METHOD and effort.rules_first(len(distinct), offloads=lower_tier is not None):
            by_rules()
        # Exact plans of solved blocks are looked for beside a lossy plan, however fast: they may be faster.
        if (
            solved is None
            or not solved.summary.exact
            or solved.summary.step_time_s > effort.rules_suffice * solved.summary.lower_bound_s
        ):
            how.progress("options")
            searched = costed.options_for(method, how.stores, effort, how.part)
            try:
                found = fastest(searched, known)
            except NO_PLAN as failure:
                if solved is None and method == METHOD and not lacking:  # they need less where blocks are not split
                    by_rules()
                if solved is None:
                    raise min([failure, *lacking], key=lambda f: f.smallest_feasible_bytes) from None
            else:
                if solved is None or preferred([solved, found]) is found:
                    solved, options = found, searched
        solved = reserve.stated(solved)
    store.add(key, solved)
    return solved, options
