"""Bounds all ways to compute the step, and all mixtures of them, by one program, and makes the mixture it describes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from stowage.stages.formulations.cuts.choice import Choice
from stowage.stages.formulations.cuts.domain import Domain
from stowage.stages.formulations.cuts.solve import CutAnswer, solve_cuts
from stowage.stages.formulations.cuts.start import live_at
from stowage.stages.ir.plan import PlanRow
from stowage.stages.ir.variant import PLAIN, VariantName
from stowage.stages.rewrite import Way, exchangeable, mixed
from stowage.stages.solve.cuts.naming import NamedWay
from stowage.stages.solve.cuts.union import Union
from stowage.stages.solve.cuts.way import CutWay
from stowage.stages.solve.program.evicting import Evicting
from stowage.stages.solve.program.of_trace import program_of
from stowage.stages.solve.program.program import StepProgram
from stowage.stages.solve.program.relief import Relief
from stowage.stages.solver.outcome import SolverSettings


class Made:
    """A way that an answer describes: named, with its program, and each node's number in the union."""

    def __init__(self, way: Way, union: Union) -> None:
        self.named = NamedWay(way)
        self.way = way
        self.program: StepProgram = program_of(way.trace, way.nodes)
        self.numbers = union.numbers_of(self.named)
        self.value_of = {s: union.values[key] for s, key in enumerate(self.named.values) if key in union.values}
        self.storage_of = {value: s for s, value in self.value_of.items()}
        self.node_of: Mapping[int, int] = {number: node for node, number in enumerate(self.numbers) if number >= 0}

    @cached_property
    def relief(self) -> Relief:
        """Return what repairs orders of it."""
        return Relief(self.program)

    @cached_property
    def evicting(self) -> Evicting:
        """Return what evicts values of it."""
        return Evicting(self.program)

    def in_union(self, storages: Iterable[int]) -> set[int]:
        """Return the numbers of values in the union."""
        return {self.value_of[s] for s in storages if s in self.value_of}


class MixedWay(CutWay):
    """Improves the bound of every mixture of ways, solve by solve.

    Cuts are chosen in the graph of one way, whose plan is the fastest so far: the guide.
    """

    def __init__(
        self,
        union: Union,
        ways: Sequence[NamedWay],
        guide: Way,
        rows: Sequence[PlanRow],
        budget_bytes: int,
        time_s: float,
        allowed: Callable[[Way], bool] = lambda way: True,
    ) -> None:
        """Begin with what is known.

        Args:
            union: the graph of all ways.
            ways: the ways.
            guide: the way, or the mixture, of the fastest plan.
            rows: that plan.
            budget_bytes: of the device.
            time_s: of that plan.
            allowed: says whether a mixture may be taken.
        """
        super().__init__(guide, program_of(guide.trace, guide.nodes), rows, budget_bytes, time_s)
        self._union = union
        self._allowed = allowed
        self._guide = Made(guide, union)
        self.bound_s = union.graph.once_s
        optional = union.graph.optional
        common = {n for n, number in enumerate(self._guide.numbers) if number >= 0 and number not in optional}
        self._choice = Choice(self.step, common)
        self._incumbent = self._guide, self._known
        chain = VariantName.of(guide.name).chain
        own = [w.way for w in ways if VariantName.of(w.way.name).chain == chain]
        self._ways = sorted(own, key=lambda w: VariantName.of(w.name).rewrite != PLAIN)
        self._numbers = {w.way.name: union.numbers_of(w) for w in ways}
        self._made: dict[tuple[int, ...], Made | None] = {}

    kind = "mixed cuts"

    @property
    def name(self) -> str:
        """Return the names of the rewrites that are mixed."""
        return ", ".join(dict.fromkeys(VariantName.of(name).rewrite for name in self._numbers))

    def _answer(self, cuts: Sequence[int], settings: SolverSettings, *, integral: bool) -> CutAnswer:
        """Solve the program of all ways; the answer's runs and values are those of the union, its cuts the guide's."""
        graph, taken = self._union.graph, list[int]()
        for cut in cuts:
            number = self._guide.numbers[cut]
            if not taken or graph.precedes(self._guide.numbers[taken[-1]], number):
                taken.append(cut)
        numbers = [self._guide.numbers[c] for c in taken]
        made, order = self._incumbent
        known = [made.numbers[n] for n in order]
        answer = solve_cuts(
            graph,
            numbers,
            self._budget_bytes,
            settings,
            integral=integral,
            known=known if -1 not in known else (),
            live=lambda positions: [made.in_union(found) for found in live_at(made.named.graph, order, positions)],
        )
        return replace(answer, cuts=tuple(taken))

    def _judged(self, answer: CutAnswer) -> list[int]:
        made = self._mixture({n for n, _ in answer.runs})
        if made is None:
            return []
        of_made = self._of_mixture(made, answer)
        order, faster = self._polished(made.named.graph, made.way, made.relief, of_made)
        if faster is None:
            faster = self._guided(made.way, made.evicting, of_made)
        if faster is not None:
            self._incumbent = made, faster
        return self._in_guide(made, order)

    def _mixture(self, ran: Collection[int]) -> Made | None:
        """Return the mixture that comes closest to nodes of the union that run."""
        first, *others = self._ways
        exchanged = [frozenset(range(len(first.blocks))), *(frozenset(exchangeable(first, w)) for w in others)]
        members = [self._members(way) for way in self._ways]
        taken: list[int] = []
        for block in range(len(first.blocks)):
            may = [k for k, blocks in enumerate(exchanged) if block in blocks]
            every = set().union(*(members[k].get(block, set()) for k in may)).intersection(ran)
            own = [members[k].get(block, set()) for k in may]
            taken.append(may[min(range(len(may)), key=lambda i: len(own[i].difference(ran)) + len(every - own[i]))])
        return self._made_of(tuple(taken), exchanged)

    def _members(self, way: Way) -> dict[int, set[int]]:
        numbers = self._numbers[way.name]
        return {block: {numbers[n.node] for n in nodes} for block, nodes in way.members.items()}

    def _made_of(self, taken: tuple[int, ...], exchanged: Sequence[Collection[int]]) -> Made | None:
        if taken not in self._made:
            way: Way | None = None
            for k, pure in enumerate(self._ways):
                if all((w == k) == (b in exchanged[k]) if k else not w for b, w in enumerate(taken)):
                    way = pure
            way = way if way is not None else mixed(self._ways, taken)
            self._made[taken] = Made(way, self._union) if way is not None and self._allowed(way) else None
        return self._made[taken]

    def _of_mixture(self, made: Made, answer: CutAnswer) -> CutAnswer:
        """Return an answer of the union as one of a mixture: nodes of other ways left out, and missing ones added.

        A cut at what the mixture does otherwise is left out too, and the intervals before and after it are one.
        """
        numbers = [self._guide.numbers[c] for c in answer.cuts]
        left = [j for j, number in enumerate(numbers, start=1) if number in made.node_of]
        cuts = tuple(made.node_of[numbers[j - 1]] for j in left)
        now = {j: k for k, j in enumerate(left, start=1)}
        runs = {(made.node_of[n], bisect_right(left, i)) for n, i in answer.runs if n in made.node_of}
        ran = {n for n, _ in runs}
        first = Domain.of(made.named.graph, cuts).first
        runs |= {(n, last) for n, (_, last) in enumerate(first) if n not in ran}
        there = made.named.graph.makers.keys() | made.named.graph.waiting
        keeps = {
            (made.storage_of[s], now[j]) for s, j in answer.keeps if j in now and made.storage_of.get(s, -1) in there
        }
        return replace(answer, cuts=cuts, runs=frozenset(runs), keeps=frozenset(keeps))

    def _in_guide(self, made: Made, order: Sequence[int]) -> list[int]:
        """Return an order in the numbers of the guide, with the levels; what the guide lacks counts with the next."""
        found: list[int] = []
        levels: list[int] = []
        highest = 0
        for node, level in zip(order, self._level, strict=True):
            highest = max(highest, level)
            own = self._guide.node_of.get(made.numbers[node])
            if own is not None:
                found.append(own)
                levels.append(highest)
                highest = 0
        self._level = levels
        return found
