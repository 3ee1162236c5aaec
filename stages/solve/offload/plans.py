"""Plans that use the tier below the device: O-ILP's, sweeps, and the fixed policies, with their copies hidden."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from stowage.stages.ir.graph import SHARED
from stowage.stages.ir.methods import method_of
from stowage.stages.solve.offload.offloader import Offloader, OffloadPlan
from stowage.stages.solve.offload.offmate import search
from stowage.stages.solve.offload.sweep.late_updates import LateUpdate, late_updates, sets_of_updates
from stowage.stages.solve.offload.sweep.sweep import least_bytes, sweeps
from stowage.stages.solve.program.chain import Execution
from stowage.stages.solve.request import PlanRequest
from stowage.stages.solver.outcome import SolverSettings

OFFMATE_SECONDS = 20.0
OFFMATE_GAP = 0.01
"""Limit and relative gap of one solve of O-ILP."""

FAR_FROM_FRACTIONAL = 1.05
"""Plans of whole tensors that take this much longer than O-ILP's fractions are raced against sweeps and policies."""

_SAME = 1e-9
"""Sums of the same times in another order."""


def tiered_plans(
    offloader: Offloader, orders: Iterable[Sequence[Execution]], request: PlanRequest, fastest_s: float
) -> tuple[list[OffloadPlan], list[OffloadPlan]]:
    """All plans found, and those within the budget that may be better than `fastest_s`, copies hidden.

    Args:
        offloader: of the program.
        orders: executions that a sweep may offload from.
        request: what is asked for.
        fastest_s: of the plans that keep everything on the device.
    """
    budget_bytes = request.device_budget_bytes
    names = {s: offloader.program.storages[s].name for s in offloader.movable} | offloader.gradients
    away = frozenset(s for s, name in names.items() if name in request.away)

    def swept() -> list[OffloadPlan]:
        return [p for order in orders for p in sweeps(offloader, order, budget_bytes, away)]

    if gradients_wait(offloader):
        listed = list(orders)
        found = [p for order in listed for p in _late(offloader, order, budget_bytes, away)]
        if offloader.below.activations and all(p.outcome.peak_bytes > budget_bytes for p in found):
            # Gradients that wait may leave no room below for activations. RK-Rotor's orders, which have all of them in
            # memory, then save too little of those.
            lean = Offloader(offloader.program, offloader.chain, replace(offloader.below, activations=False))
            for order in (*listed, lean.leanest()):
                found += _late(lean, order, budget_bytes, away)
        return found, list(_shifted(offloader, found, budget_bytes, fastest_s))
    settings = SolverSettings(time_limit_s=OFFMATE_SECONDS, gap=OFFMATE_GAP, seed=request.seed)
    preprint = method_of(request.method).whole_blocks
    found = list(search.plans(offloader, budget_bytes, settings, preprint=preprint))
    fitting = list(_shifted(offloader, found, budget_bytes, fastest_s))
    if not preprint and not any(p.outcome.time_s <= p.fractional_s * FAR_FROM_FRACTIONAL for p in fitting):
        others = list(offloader.fixed())
        if not fitting or not offloader.below.cpu_update_bytes_per_s:  # a sweep updates on the device
            others += swept()
        found += others
        fitting += _shifted(offloader, others, budget_bytes, fastest_s)
    return found, fitting


def _late(
    offloader: Offloader, executions: Sequence[Execution], budget_bytes: int, away: frozenset[int]
) -> Iterator[OffloadPlan]:
    """Sweeps with more and fewer updates by the CPU; with half of them where the host has no room for that."""
    found = list(sweeps(offloader, executions, budget_bytes, away))
    yield from found
    if not found:
        return  # with updates by the CPU more is below
    updates = late_updates(offloader, executions)
    spare_bytes = budget_bytes - least_bytes(offloader, executions)
    taken: Sequence[LateUpdate] = ()
    found = []
    for taken in sets_of_updates(offloader, executions, updates, spare_bytes):
        found += sweeps(offloader, executions, budget_bytes, away, taken)
    while taken and not found:
        taken = taken[(len(taken) + 1) // 2 :]
        found += sweeps(offloader, executions, budget_bytes, away, taken) if taken else ()
    yield from found


def gradients_wait(offloader: Offloader) -> bool:
    """Whether gradients outlive the step of the cycle that completes them: O-ILP knows of none that do.

    They wait for the norm of all of them, or for a later micro-batch.
    """
    late = any(n.block == SHARED and n.phase == "update" and n.mutates for n in offloader.program.nodes)
    return late or bool(offloader.gradients)


def _shifted(
    offloader: Offloader, plans: Iterable[OffloadPlan], budget_bytes: int, fastest_s: float
) -> Iterator[OffloadPlan]:
    """The plans that fit with their copies hidden, but for those that one resource alone makes slower than another."""
    link, nodes = offloader.below.link, offloader.program.nodes

    def least_s(plan: OffloadPlan) -> float:
        """However well its copies are hidden: computing, copying each way, and updating by the CPU, each alone."""
        found = plan.outcome
        cpu_s = sum(offloader.cpu_update_s(nodes[s.node]) for s in plan.steps if s.kind == "update")
        down_s, up_s = found.offload_bytes / link.offload_bytes_per_s, found.reload_bytes / link.reload_bytes_per_s
        return max(found.time_s - found.wait_s, cpu_s, down_s, up_s)

    fitting = [(least_s(p), p) for p in plans if p.outcome.peak_bytes <= budget_bytes]
    for at_least_s, plan in sorted(fitting, key=lambda pair: pair[0]):
        if at_least_s >= fastest_s * (1 + _SAME):
            return
        found = offloader.shifted(plan, budget_bytes)
        fastest_s = min(fastest_s, found.outcome.time_s)
        yield found
