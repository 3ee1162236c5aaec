"""Plans a step in sizes that were not measured, from a size that was, without profiling.

Where everything fits nothing is searched either.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from stowage.flows.planning.costed import Costed
from stowage.flows.planning.effort import Effort
from stowage.flows.planning.plan_store import PlanStore
from stowage.flows.planning.planned import Planned
from stowage.stages.ir.block import BlockGraph
from stowage.stages.ir.costs import Cost
from stowage.stages.ir.errors import IllegalPlanError, Infeasible
from stowage.stages.ir.freezable import Freezable
from stowage.stages.ir.graph import Block, ComputeNode
from stowage.stages.ir.methods import method_of
from stowage.stages.ir.plan import Option, PlanRow, Slot
from stowage.stages.ir.trace import TraceTables
from stowage.stages.ir.variant import VariantName
from stowage.stages.options.generate import found_of, options_of
from stowage.stages.partition import make_blocks
from stowage.stages.partition.scale import scaled, structure_of
from stowage.stages.rewrite import Way, needed_variant, variant_named, variants_of
from stowage.stages.solve import PlanRequest, Solved, Variant, keep_everything_at_once, same_rows, solve_variants
from stowage.stages.solve.frozen import MOST_BYTES, freezing_plan, keeping_plan

SLOTS = 100
"""Memory slots of RK-Rotor, for sizes whose costs are estimates."""

PLANS = 4
"""Number of plans of each structure whose rows are tried in other sizes."""


@dataclass(frozen=True)
class _Rows:
    """The rows of a plan; `nbytes` is the size of its step."""

    variant: str
    rows: Sequence[PlanRow]
    slots: Sequence[Slot]
    method: str
    nbytes: int


@dataclass
class _Reference:
    """A step of one structure that was measured and planned in full.

    Attributes:
        costed: the step, with its costs and blocks.
        searched: its blocks have schedules; not where everything fitted.
        plans: rows of its plans.
    """

    costed: Costed
    searched: bool
    plans: list[_Rows] = field(default_factory=list)


@dataclass(frozen=True)
class AtOnce:
    """A plan, and the variant whose tables it is for."""

    variant: Way
    solved: Solved
    options: list[Option]


def everything_kept(variant: Variant, request: PlanRequest, freezable: Freezable | None = None) -> AtOnce | None:
    """Return the plan that keeps everything, where that fits the budget and a method would choose it.

    Where something is frozen, it must fit under the worst choice of what trains.
    """
    if not method_of(request.method).keeps:
        return None
    budget_bytes = request.device_budget_bytes
    if freezable is not None:
        request = replace(request, device_budget_bytes=MOST_BYTES)
    solved = keep_everything_at_once(variant.trace, variant.nodes, request)
    if solved is not None and freezable is not None:
        solved = keeping_plan(freezing_plan(variant.trace, variant.nodes, solved, freezable, budget_bytes))
    if solved is None or solved.summary.device_peak_bytes > budget_bytes:
        return None
    return AtOnce(variant, replace(solved, summary=replace(solved.summary, variant=variant.name)), [])


class Sizes:
    """Remembers steps that were planned in full, and plans others from them."""

    def __init__(self, most: int) -> None:
        """Keep at most `most` structures, the latest."""
        self._most = most
        self._known: OrderedDict[str, _Reference] = OrderedDict()

    def learn(self, costed: Costed, *, searched: bool = True) -> None:
        """Take in a step that was measured, and whether schedules of its blocks were searched."""
        key = structure_of(costed.variants[0].trace)
        known = self._known.get(key)
        if known is not None and known.searched and not searched:
            return
        self._known[key] = _Reference(costed, searched, known.plans if known else [])
        self._known.move_to_end(key)
        while len(self._known) > self._most:
            self._known.popitem(last=False)

    def learn_plan(self, trace: TraceTables, planned: Planned) -> None:
        """Take in a plan; `trace` is that of the step as it was recorded."""
        reference = self._known.get(structure_of(trace))
        if reference is None:
            return
        nbytes = sum(s.nbytes for s in trace.storages)
        mine = _Rows(planned.summary.variant, planned.rows, planned.slots, planned.summary.method, nbytes)
        if mine.method != "keep_all" and all(p.rows != mine.rows for p in reference.plans):
            reference.plans = sorted([mine, *reference.plans], key=lambda p: -p.nbytes)[:PLANS]

    def nodes(self, trace: TraceTables, costs: Mapping[str, Cost]) -> tuple[list[ComputeNode], list[Block]]:
        """Return nodes and blocks of a step as it was recorded."""
        reference = self._known.get(structure_of(trace))
        found = None
        if reference is not None:
            found = _scaled(reference.costed, reference.costed.variants[0], trace, costs)
        return found or make_blocks(trace, costs)

    def plan(
        self,
        trace: TraceTables,
        nodes: Sequence[ComputeNode],
        blocks: Sequence[Block],
        costs: Mapping[str, Cost],
        request: PlanRequest,
        stores: Path,
        effort: Effort,
        *,
        only_kept: bool = False,
        freezable: Freezable | None = None,
    ) -> AtOnce | None:
        """Return a plan within the budget, if there is one without measuring and long searching.

        Args:
            trace: the step as it was recorded.
            nodes: its nodes; see `nodes`.
            blocks: its blocks.
            costs: costs of every call of it and of its rewrites.
            request: budget, method and limits of the plan.
            stores: see `Planning`.
            effort: see `Planning`.
            only_kept: accept only a plan that keeps everything.
            freezable: what the step may freeze; then no other plan is made without searching.
        """
        if freezable is not None:
            return everything_kept(Variant("plain", trace, nodes, blocks), request, freezable)
        reference = self._known.get(structure_of(trace))
        if reference is not None and not only_kept and any(p.slots for p in reference.plans):
            # The same rows keep weights in the same tier between steps of all sizes.
            found = self._same_rows(reference, trace, costs, request)
            if found is not None:
                return found
        found = everything_kept(Variant("plain", trace, nodes, blocks), request)
        if found is not None:
            return found
        if reference is None or only_kept:
            return None
        candidates = [self._same_rows(reference, trace, costs, request)]
        if method_of(request.method).keeps and reference.searched:
            in_memory = replace(request, lower_tier=None)
            candidates.append(self._searched(reference, trace, costs, in_memory, stores, effort))
        return min((c for c in candidates if c), key=lambda c: c.solved.summary.step_time_s, default=None)

    def _same_rows(
        self, reference: _Reference, trace: TraceTables, costs: Mapping[str, Cost], request: PlanRequest
    ) -> AtOnce | None:
        """Return the fastest of the plans of this structure that fits here too."""
        found: list[AtOnce] = []
        scales = _Scales(reference.costed, request.method, trace, costs)
        for plan in reference.plans:
            variant = scales.variant(plan.variant)
            if variant is None:
                continue
            solved = same_rows(variant.trace, variant.nodes, plan.rows, plan.slots, plan.method, request)
            if solved is not None:
                solved = replace(solved, summary=replace(solved.summary, variant=variant.name))
                found.append(AtOnce(variant, solved, []))
        return min(found, key=lambda f: f.solved.summary.step_time_s, default=None)

    def _searched(
        self,
        reference: _Reference,
        trace: TraceTables,
        costs: Mapping[str, Cost],
        request: PlanRequest,
        stores: Path,
        effort: Effort,
    ) -> AtOnce | None:
        """Return what RK-Rotor finds with the schedules that were found for the blocks in another size."""
        scales = _Scales(reference.costed, request.method, trace, costs)
        pairs = [(before, scales.whole(before.name)) for before in reference.costed.variants_for(request.method)]
        variants = [variant for _, variant in pairs if variant is not None]
        if not variants:
            return None
        request = replace(request, slots=min(request.slots, SLOTS))
        store = PlanStore(stores / "solved")
        key = store.key(variants, "similar", request, effort.grid, effort.solver)
        solved = store.find(key, variants, budget_bytes=request.device_budget_bytes)
        options: list[Option] = []
        if solved is None:
            known: dict[str, list[Option]] = {}
            for option in reference.costed.options_at_hand(request.method, stores, effort):
                known.setdefault(option.block_hash, []).append(option)
            found: dict[str, list[Option]] = {}
            for before, variant in pairs:
                for old, block in zip(before.blocks, variant.blocks if variant else (), strict=False):
                    if block.block_hash not in found:
                        graph = BlockGraph.from_json(block.graph)
                        found[block.block_hash] = options_of(graph, found_of(known[old.block_hash]))
            options = [o for own in found.values() for o in own]
            try:
                solved = solve_variants(variants, options, request)
            except (Infeasible, IllegalPlanError):
                return None
            store.add(key, solved)
        return AtOnce(needed_variant(variants, solved.summary.variant), solved, options)


class _Scales:
    """Makes variants of a step in the size of another, each once."""

    def __init__(self, costed: Costed, method: str, trace: TraceTables, costs: Mapping[str, Cost]) -> None:
        self._costed = costed
        self._costs = costs
        self._before = {v.name: v for v in (*costed.variants, *costed.variants_for(method))}
        self._traces = variants_of(trace)
        self._made: dict[str, Variant | None] = {}

    def variant(self, name: str) -> Way | None:
        """Return the variant of this name, or None where it is another computation here."""
        if name in self._before:
            return self.whole(name)
        found = [self.whole(each) for each in self._before]
        return variant_named([v for v in found if v is not None], name)

    def whole(self, name: str) -> Variant | None:
        """Return the variant of this name, which mixes no rewrites, or None where it is another computation here."""
        if name not in self._made:
            self._made[name] = self._make(name)
        return self._made[name]

    def _make(self, name: str) -> Variant | None:
        before, trace = self._before.get(name), self._traces.get(VariantName.of(name).rewrite)
        if before is None or trace is None or any(c.signature not in self._costs for c in trace.calls):
            return None
        found = _scaled(self._costed, before, trace, self._costs)
        return Variant(name, trace, *found) if found is not None else None


def _scaled(
    costed: Costed, before: Variant, trace: TraceTables, costs: Mapping[str, Cost]
) -> tuple[list[ComputeNode], list[Block]] | None:
    if structure_of(before.trace) != structure_of(trace):
        return None
    old = {c.signature: c for c in costed.costs}
    return scaled(before.nodes, before.blocks, (before.trace, old), (trace, costs))
