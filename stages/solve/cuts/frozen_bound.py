"""Bounds the mean time of every plan of a step that freezes, which must fit under every mask of so many units.

One plan serves all masks. So the program has its runs and what it keeps, as where everything trains, and

- its objective is the mean time: of a node's first run the share of masks under which it runs at all, and of each
  further run the share that it has at least (`certain_guards`).
- memory at a cut is counted under masks: what is kept there, is not made again, and is read later under something of
  the mask for certain. Every mask gives a row that holds; those are added that an answer exceeds the budget under, the
  worst first, until there is none or time is over.

Collectives may run beside computing, and the CPU may update what is in a lower tier: neither counts as computing then.
The mean time is also at least that of all collectives, one after another. Where plans may offload no cut is solved for.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from stowage.stages.formulations.cuts.choice import Choice
from stowage.stages.formulations.cuts.domain import Domain
from stowage.stages.formulations.cuts.masked import Mask, Masks
from stowage.stages.formulations.cuts.solve import CutAnswer, solve_cuts
from stowage.stages.formulations.cuts.step_graph import StepGraph, both_lanes_s
from stowage.stages.formulations.freezing.worst_mask import worst_mask
from stowage.stages.ir.freezable import Freezable
from stowage.stages.ir.graph import ComputeNode
from stowage.stages.ir.masked_bytes import MaskedBytes
from stowage.stages.ir.units import ALWAYS, joined
from stowage.stages.ir.variant import PLAIN, VariantName
from stowage.stages.rewrite import Way
from stowage.stages.solve.cuts.certain_guards import CertainGuards
from stowage.stages.solve.cuts.naming import NamedWay
from stowage.stages.solve.cuts.statement import Bound, with_bound
from stowage.stages.solve.cuts.union import Union, least_s
from stowage.stages.solve.summary import PROVEN, Solved
from stowage.stages.solver.outcome import SolverSettings

PLACES = 4
"""Places for a cut that are tried, where the plan needs most memory."""

ROUNDS = 6
"""Times that masks are added for the same cuts."""

GAP = 1e-4
"""Gap of one solve."""

ABOVE = 1e-6
"""Relative distance to the time of every node once from which on a cut says more."""

MASK_SECONDS = 0.3
"""Time limit of one solve for the worst mask."""


@dataclass(frozen=True)
class FrozenBound:
    """What is proven.

    Attributes:
        bound_s: no plan has a lower mean time.
        cuts: the nodes at which the step was cut for it; none where it is the time of every node once.
    """

    bound_s: float
    cuts: tuple[int, ...] = ()


class FrozenStep:
    """Bounds all ways to compute a step that freezes, and all mixtures of them.

    Attributes:
        once_s: the mean time of every node once.
        first_runs: for each node of the union the share of masks under which it runs.
    """

    def __init__(self, ways: Sequence[NamedWay], union: Union, freezable: Freezable, budget_bytes: int) -> None:
        """Find what is certain of every plan.

        Args:
            ways: the ways.
            union: the graph of all of them.
            freezable: what may be frozen.
            budget_bytes: of the device, under every mask.
        """
        self._union, self._freezable, self._budget_bytes = union, freezable, budget_bytes
        self._guards = guards = CertainGuards(union, freezable)
        self.first_runs = guards.first
        numbers = {way.way.name: union.numbers_of(way) for way in ways}

        def least(shares: Sequence[float]) -> float:
            return least_s([_weighted(w.way, [shares[n] for n in numbers[w.way.name]]) for w in ways])

        self.once_s = least(guards.first)
        self._constant_s = least([f - a for f, a in zip(guards.first, guards.again, strict=True)])
        self._graph = replace(
            union.graph,
            nodes=[_under_any(n, a) for n, a in zip(union.graph.nodes, guards.again, strict=True)],
            least_s=least(guards.again),
        )
        self._times_s = [n.time_s for n in union.graph.nodes]
        self._masks: list[int] = []

    def improve(self, places: Sequence[int], deadline_s: float) -> FrozenBound:
        """Return the best bound that is found in time.

        Args:
            places: nodes for a cut.
            deadline_s: on the clock of `time.monotonic`.
        """
        bounds = {place: self._bounded([place], deadline_s, integral=False) for place in places}
        order = sorted(bounds, key=lambda place: -bounds[place])
        best = FrozenBound(max([self.once_s, *bounds.values()]), tuple(order[:1]))
        for count in (1, len(order)):
            cuts = self._chain(order[:count])
            bound_s = self._bounded(cuts, deadline_s, integral=count == 1)
            if bound_s > best.bound_s:
                best = FrozenBound(bound_s, tuple(cuts))
        return best if best.bound_s > self.once_s * (1 + ABOVE) else FrozenBound(self.once_s)

    def _chain(self, places: Sequence[int]) -> list[int]:
        found: list[int] = []
        for place in sorted(places):
            if not found or self._graph.precedes(found[-1], place):
                found.append(place)
        return found

    def _bounded(self, cuts: Sequence[int], deadline_s: float, *, integral: bool) -> float:
        """Return the bound of some cuts, with masks added as they are exceeded."""
        after = _AfterCuts(self._graph, self._guards, cuts)
        found_s = self.once_s
        for _ in range(ROUNDS):
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                break
            masks = after.masks([self._mask(after, mask) for mask in self._masks], self._times_s)
            settings = SolverSettings(left_s, GAP)
            answer = solve_cuts(self._graph, cuts, self._budget_bytes, settings, integral=integral, masks=masks)
            found_s = max(found_s, answer.bound_s + self._constant_s)
            mask = self._exceeding(answer, after)
            if mask is None or mask in self._masks:
                break
            self._masks.append(mask)
        return found_s

    def _mask(self, after: _AfterCuts, mask: int) -> Mask:
        absent = sum(nbytes for guard, nbytes in self._guards.gradients.items() if not guard & mask)
        return Mask(self._graph.base_bytes - absent, after.counted(mask), after.beside(mask))

    def _exceeding(self, answer: CutAnswer, after: _AfterCuts) -> int | None:
        """Return the mask under which an answer takes most, if that is more than there is."""
        if not answer.runs:
            return None
        base = self._graph.base_bytes - self._guards.gradients.total()
        levels: list[Counter[int]] = [Counter(self._guards.gradients) for _ in answer.cuts]
        for (value, cut), part in answer.held.items():
            guard = after.needed.get((value, cut), 0)
            if guard:
                own = after.guard_of_cut(cut) if after.reads(value, cut) else 0
                levels[cut - 1][joined(guard, own)] += int(self._graph.nbytes[value] * part)
                levels[cut - 1][own] -= int(self._graph.nbytes[value] * part)
        for cut, level in enumerate(levels, start=1):
            level[ALWAYS] += base
            level[after.guard_of_cut(cut)] += after.own_bytes(cut)
            level.pop(0, None)
        units = self._freezable.units
        rows = [MaskedBytes(j, level) for j, level in enumerate(levels)]
        worst = worst_mask(rows, len(units), self._freezable.active, SolverSettings(MASK_SECONDS))
        return worst.mask if worst.nbytes > self._budget_bytes else None


class _AfterCuts:
    """Finds what is certain of what runs after cuts.

    Attributes:
        needed: by (value, cut) the guard under which the value is read after the cut, from there or made again.
    """

    def __init__(self, graph: StepGraph, guards: CertainGuards, cuts: Sequence[int]) -> None:
        self._graph, self._guards, self._cuts = graph, guards, cuts
        self._first = Domain.of(graph, cuts).first
        self.needed: dict[tuple[int, int], int] = {}
        for j in range(1, len(cuts) + 1):
            for value, needs in guards.needs.items():
                later = [need.guard for need in needs if self._first[need.node][0] >= j]
                guard = joined(guards.kept.get(value, 0), *later)
                if guard:
                    self.needed[value, j] = guard
        self._again = {key for key in self.needed if self._made_again(*key)}

    def _early(self, node: int, cut: int) -> bool:
        """Say whether a node has run before a cut for certain, and once under every mask."""
        if node in self._graph.optional or self._first[node][1] >= cut:
            return False
        return bool(self._guards.guards[node] & ALWAYS) and self._graph.nodes[node].phase == "forward"

    def _made_again(self, value: int, cut: int) -> bool:
        makers = self._graph.makers.get(value, ())
        return len(makers) == 1 and self._early(makers[0], cut)

    def counted(self, mask: int) -> dict[tuple[int, int], float]:
        """Return what counts under a mask, with the share of masks that making it again takes."""
        return {
            key: self._guards.share(_common(guard, mask)) if key in self._again else 0.0
            for key, guard in self.needed.items()
            if guard & mask and not (self.reads(*key) and self.guard_of_cut(key[1]) & mask)
        }

    def reads(self, value: int, cut: int) -> bool:
        """Say whether a cut reads a value for certain."""
        node = self._cuts[cut - 1]
        return value in self._graph.reads[node] and self._graph.serving(node, value) == (value,)

    def guard_of_cut(self, cut: int) -> int:
        """Return the guard under which a cut runs, if it has one run."""
        return self._guards.guards[self._cuts[cut - 1]]

    def own_bytes(self, cut: int) -> int:
        """Return what a cut reads, and its workspace."""
        node = self._cuts[cut - 1]
        reads = sum(self._graph.nbytes[s] for s in self._graph.reads[node] if self.reads(s, cut))
        return max(0, reads + self._graph.nodes[node].workspace_bytes - self._graph.taken_bytes(node))

    def beside(self, mask: int) -> dict[int, int]:
        """Return what the cuts that run under a mask need by themselves."""
        cuts = range(1, len(self._cuts) + 1)
        return {j: self.own_bytes(j) for j in cuts if self.guard_of_cut(j) & mask}

    def masks(self, masks: Sequence[Mask], times_s: Sequence[float]) -> Masks:
        """Return all that counts."""
        missed = {key: self._guards.share(self.needed[key]) for key in sorted(self._again)}
        makers = {self._graph.maker[value] for value, _ in missed}
        late = {}
        for j in range(1, len(self._cuts) + 1):
            for node in (n.node for n in self._graph.nodes if self._early(n.node, j)):
                if node not in self._guards.anyway:
                    late[node, j] = self._late_readers(node, j)
        return Masks(masks, missed, {n: times_s[n] for n in sorted(makers)}, late)

    def _late_readers(self, node: int, cut: int) -> frozenset[int]:
        """Return what may read a node's late run for the results of forward; none where it makes such a result."""
        readers: set[int] = set()
        for value in self._graph.nodes[node].creates:
            if self._guards.kept.get(value, 0) & ALWAYS:
                return frozenset()
            for need in self._guards.needs[value]:
                if need.guard & ALWAYS:
                    if not self._early(need.node, cut):
                        return frozenset()
                    readers.add(need.node)
        return frozenset(readers)


def _common(guard: int, mask: int) -> int:
    """Return what a guard and a mask have in common; that is everything where both are always there."""
    return ALWAYS if guard & ALWAYS else guard & mask


def _in_order(way: Way, *, offloads: bool) -> Way:
    """Return a way in which nothing counts that may run beside computing."""

    def counted(node: ComputeNode) -> ComputeNode:
        beside = node.collective or (offloads and node.phase == "update")
        return replace(node, collective=False, time_s=0.0) if beside else node

    return Way(way.name, way.trace, [counted(n) for n in way.nodes], way.blocks)


def _under_any(node: ComputeNode, share: float) -> ComputeNode:
    """Return a node with a share of its time, and the least workspace that it has under any mask."""
    workspace_bytes = min(node.flagged_bytes, default=node.workspace_bytes - node.copied_bytes)
    return replace(node, time_s=node.time_s * share, workspace_bytes=workspace_bytes)


def _weighted(way: Way, shares: Sequence[float]) -> Way:
    nodes = [replace(n, time_s=n.time_s * share) for n, share in zip(way.nodes, shares, strict=True)]
    return Way(way.name, way.trace, nodes, way.blocks)


def frozen_bound(
    plan: Solved, guide: Way, ways: Sequence[Way], freezable: Freezable, seconds: float, *, offloads: bool = False
) -> Solved:
    """Return a plan that freezes, with the bound of all ways and their mixtures.

    Args:
        plan: the plan.
        guide: the way that it is of; cuts are chosen where it needs most memory.
        ways: the ways.
        freezable: what may be frozen.
        seconds: for everything; 0 for no bound.
        offloads: whether plans may offload, and update on the CPU.
    """
    deadline_s = time.monotonic() + seconds
    if not seconds:
        return plan
    ordered = sorted(ways, key=lambda way: VariantName.of(way.name).rewrite != PLAIN)
    named = [NamedWay(_in_order(way, offloads=offloads)) for way in ordered]
    union = Union.of(named)
    if union is None:
        return plan
    own = NamedWay(_in_order(guide, offloads=offloads))
    numbers = union.numbers_of(own)
    common = {n for n, number in enumerate(numbers) if number >= 0 and number not in union.graph.optional}
    step = FrozenStep(named, union, freezable, plan.summary.device_budget_bytes)
    exchanged_s = sum(
        step.first_runs[numbers[n]] * guide.nodes[n].time_s for n in sorted(common) if guide.nodes[n].collective
    )
    found = FrozenBound(step.once_s)
    if not offloads:
        peaks: dict[int, int] = {}
        for row in plan.rows:
            if row.action == "compute":
                peaks.setdefault(row.node, row.peak_bytes)
        places = {n for n in common if not guide.nodes[n].collective}
        found = step.improve(
            [numbers[n] for n in Choice(own.graph, places).hottest(peaks, PLACES)],
            deadline_s,
        )
    if (once_s := both_lanes_s(step.once_s, exchanged_s)) > found.bound_s:
        found = FrozenBound(once_s)
    kind = "cuts under masks" if found.cuts else "once"
    cuts = tuple(union.graph.nodes[n].name for n in found.cuts)
    variant = ", ".join(dict.fromkeys(VariantName.of(w.way.name).rewrite for w in named))
    return with_bound(plan, Bound(found.bound_s, kind, cuts, variant), PROVEN)
