"""Chooses the makers of plans that use the lower tier: O-ILP, fixed policies, and Belady's rule."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from stowage.stages.ir.graph import SHARED
from stowage.stages.ir.methods import method_of
from stowage.stages.solve.judged_plans import JudgedPlans
from stowage.stages.solve.offload.belady.belady import belady_plans, least_bytes
from stowage.stages.solve.offload.belady.late_updates import LateUpdate, late_updates, sets_of_updates
from stowage.stages.solve.offload.offloader import Offloader
from stowage.stages.solve.offload.offmate.search import OffMate
from stowage.stages.solve.offload.streaming import Streaming
from stowage.stages.solve.offload.tier import LowerTier
from stowage.stages.solve.program.chain import Execution
from stowage.stages.solve.proposal import Proposals, Source, Task

POOR_ROUNDING = 1.05
"""Factor from which plans of whole tensors count as much slower than O-ILP's fractions, so that others compete."""

MANY_NODES = 4000
"""Where a step has more nodes, and a plan of other sources fits, O-ILP is asked only once and Belady's rule not at all,
since both take minutes."""


def offload_sources(
    task: Task, lower_tier: LowerTier, orders: Iterable[Sequence[Execution]], plans: JudgedPlans
) -> Iterator[Source]:
    """Yield sources, the later ones only where plans so far are poor.

    Args:
        task: the program with its chain.
        lower_tier: the lower tier.
        orders: executions from which Belady's rule may offload.
        plans: what was judged so far.
    """
    offloader = Offloader(task.program, task.chain, lower_tier)
    before = len(plans.judged), len(plans.fitting)
    if gradients_wait(offloader):
        listed = list(orders)
        yield LateUpdatePlans(offloader, listed)
        if lower_tier.activations and not any(plans.referee.fits(p) for p in plans.judged[before[0] :]):
            # Gradients that wait may leave no room in the lower tier for activations. RK-Rotor's orders, which keep all
            # activations in memory, then save too little.
            lean = Offloader(task.program, task.chain, replace(lower_tier, activations=False))
            yield LateUpdatePlans(lean, [*listed, lean.leanest()])
        return
    preprint = method_of(task.request.method).whole_blocks
    known = any(p.tier is not None for p in plans.fitting)  # by now such are of choices for groups
    only_better = known and len(task.program.nodes) > MANY_NODES
    if preprint or task.request.o_ilp_searches:
        yield OffMate(offloader, preprint=preprint, only_better=only_better)
    fitting = plans.fitting[before[1] :]
    if not preprint and not any(p.time_s <= p.fractional_s * POOR_ROUNDING for p in fitting):
        fits = bool(fitting) or only_better
        by_rule = not fits or not lower_tier.cpu_update_bytes_per_s  # Belady's rule updates on the device
        yield RuleSource(offloader, orders if by_rule else ())


def gradients_wait(offloader: Offloader) -> bool:
    """Return whether gradients outlive the step of the cycle that completes them: O-ILP knows of none that do.

    They wait for the norm of all of them, or for a later micro-batch.
    """
    late = any(n.block == SHARED and n.phase == "update" and n.mutates for n in offloader.program.nodes)
    return late or bool(offloader.gradients)


@dataclass(frozen=True)
class RuleSource:
    """Proposes plans that need no solver: fixed policies, and plans by Belady's rule from some orders."""

    offloader: Offloader
    orders: Iterable[Sequence[Execution]]

    def propose(self, task: Task) -> Proposals:
        """Propose the fixed policies, then plans by Belady's rule."""
        yield from Streaming(self.offloader).propose(task)
        at_rest = offloaded_at_rest(self.offloader, task)
        for order in self.orders:
            yield from belady_plans(self.offloader, order, task.budget_bytes, at_rest)


@dataclass(frozen=True)
class LateUpdatePlans:
    """Proposes plans by Belady's rule for programs whose gradients wait: with more and fewer updates by the CPU."""

    offloader: Offloader
    orders: Sequence[Sequence[Execution]]

    def propose(self, task: Task) -> Proposals:
        """Propose plans from each order."""
        for order in self.orders:
            yield from self._over(order, task)

    def _over(self, executions: Sequence[Execution], task: Task) -> Proposals:
        offloader, budget_bytes = self.offloader, task.budget_bytes
        at_rest = offloaded_at_rest(offloader, task)
        accepted = yield from belady_plans(offloader, executions, budget_bytes, at_rest)
        if not accepted:
            return  # with updates by the CPU more is offloaded
        updates = late_updates(offloader, executions)
        spare_bytes = budget_bytes - least_bytes(offloader, executions)
        taken: Sequence[LateUpdate] = ()
        accepted = 0
        for taken in sets_of_updates(offloader, executions, updates, spare_bytes):
            accepted += yield from belady_plans(offloader, executions, budget_bytes, at_rest, taken)
        while taken and not accepted:  # the host has no room for so many: try half of them
            taken = taken[(len(taken) + 1) // 2 :]
            if taken:
                accepted += yield from belady_plans(offloader, executions, budget_bytes, at_rest, taken)


def offloaded_at_rest(offloader: Offloader, task: Task) -> frozenset[int]:
    """Return the storages that are offloaded between iterations in the plans of other micro-batches."""
    names = {s: offloader.program.storages[s].name for s in offloader.movable} | offloader.gradients
    return frozenset(s for s, name in names.items() if name in task.request.offloaded_at_rest)
