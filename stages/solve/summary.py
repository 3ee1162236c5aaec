"""Writes what a plan states about itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from stowage.stages.formulations.cuts.step_graph import both_lanes_s
from stowage.stages.ir.graph import ComputeNode
from stowage.stages.ir.plan import PlanRow, PlanSummary, Slot, plan_hash
from stowage.stages.ir.trace import TraceTables
from stowage.stages.ir.units import Unit
from stowage.stages.simulate.plan import Outcome
from stowage.stages.simulate.slots import slots_of
from stowage.stages.solve.offload.tier import LowerTier
from stowage.stages.solve.proposal import JudgedPlan
from stowage.stages.solve.request import PlanRequest

PROVEN = 1e-9
"""Relative distance to the step's lower bound within which a plan is proven optimal, whoever decided it."""


@dataclass(frozen=True)
class Solved:
    """A plan that the referee accepted, with what it states about itself.

    Attributes:
        rows: the plan.
        summary: what it states.
        slots: places in the lower tier of what it offloads.
        units: what a step may freeze; none where nothing is ever frozen.
        proving_s: seconds that the bound took, and the search for schedules by it; 0 where the plan was in a store.
    """

    rows: list[PlanRow]
    summary: PlanSummary
    slots: list[Slot] = field(default_factory=list)
    units: list[Unit] = field(default_factory=list)
    proving_s: float = field(default=0.0, compare=False)


@dataclass(frozen=True)
class KeepingAll:
    """Time and bytes of the same iteration where nothing is computed again and nothing is offloaded."""

    peak_bytes: int
    time_s: float


def solved(
    trace: TraceTables,
    nodes: Sequence[ComputeNode],
    plan: JudgedPlan,
    keeping_all: KeepingAll,
    smallest_feasible_bytes: int,
    request: PlanRequest,
    bound_s: float | None = None,
) -> Solved:
    """Return the plan with its summary and its slots.

    Args:
        trace: the trace of the step.
        nodes: its compute nodes.
        plan: the plan that was chosen.
        keeping_all: time and bytes of keep-all, to compare with.
        smallest_feasible_bytes: the smallest budget for which a plan was found.
        request: what was asked for.
        bound_s: a lower bound on the step's time; by default that of these nodes.
    """
    bound_s = lower_bound_s(nodes, request.lower_tier) if bound_s is None else bound_s
    slots = slots_of(trace, plan.steps, plan.state) if plan.tier is not None else []
    return Solved(
        plan.outcome.rows,
        _summary_of(trace, nodes, plan, keeping_all, smallest_feasible_bytes, request, bound_s),
        slots,
    )


def _summary_of(
    trace: TraceTables,
    nodes: Sequence[ComputeNode],
    plan: JudgedPlan,
    keeping_all: KeepingAll,
    smallest_feasible_bytes: int,
    request: PlanRequest,
    bound_s: float,
) -> PlanSummary:
    outcome, decision = plan.outcome, plan.decision
    status, gap = proven(outcome, decision.status, decision.gap, bound_s)
    return PlanSummary(
        plan_hash=plan_hash(outcome.rows, trace.meta.configuration_hash, request.device_budget_bytes),
        configuration_hash=trace.meta.configuration_hash,
        method=plan.method,
        device=request.device,
        device_budget_bytes=request.device_budget_bytes,
        device_peak_bytes=outcome.peak_bytes,
        baseline_bytes=outcome.baseline_bytes,
        step_time_s=outcome.time_s,
        lower_bound_s=min(bound_s, outcome.time_s),  # the same times, added up in another order
        recomputed_bytes=outcome.recomputed_bytes,
        activation_bytes=outcome.activation_bytes,
        keep_all_peak_bytes=keeping_all.peak_bytes,
        keep_all_time_s=keeping_all.time_s,
        smallest_feasible_bytes=smallest_feasible_bytes,
        solver=decision.solver,
        status=status,
        gap=gap,
        time_limit_s=decision.time_limit_s,
        seed=decision.seed,
        device_fingerprint=request.device_fingerprint,
        estimated_nodes=sum(n.estimated for n in nodes),
        lower_tier_bytes=outcome.lower_tier_bytes,
        offload_bytes=outcome.offload_bytes,
        reload_bytes=outcome.reload_bytes,
        wait_s=outcome.wait_s,
        fractional_time_s=plan.fractional_s,
        rates_bound_s=plan.rates_bound_s,
        disk_bytes=outcome.disk_bytes,
    )


def proven(outcome: Outcome, status: str, gap: float | None, bound_s: float) -> tuple[str, float]:
    """Return status and gap of a plan: its solver's, unless the plan reaches the lower bound of the step.

    A plan by a rule, of which no solver says anything, states its distance to that lower bound.
    """
    to_bound = max(0.0, 1 - bound_s / outcome.time_s)
    if to_bound < PROVEN:
        return "optimal", 0.0
    return status, to_bound if gap is None else gap


def lower_bound_s(nodes: Iterable[ComputeNode], lower_tier: LowerTier | None) -> float:
    """Return the time of every node once; updates only where the CPU cannot take them over.

    Collectives run beside computing, one after another.
    """
    beside = lower_tier is not None and lower_tier.cpu_update_bytes_per_s > 0
    nodes = list(nodes)
    together_s = sum(n.time_s for n in nodes if n.collective)
    computing_s = sum(n.time_s for n in nodes if not n.collective and not (beside and n.phase == "update"))
    return both_lanes_s(computing_s, together_s)


def suffices(plan: Solved, enough: float) -> bool:
    """Return whether a plan takes at most so many times as long as what is proven for it."""
    return plan.summary.step_time_s <= enough * plan.summary.lower_bound_s
