"""Bounds one way to compute the step by cuts, and looks for a schedule of it that is as fast as the bound."""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Sequence
from functools import cached_property

from stowage.stages.formulations.cuts.choice import Choice
from stowage.stages.formulations.cuts.schedule import order_of
from stowage.stages.formulations.cuts.solve import CutAnswer, solve_cuts
from stowage.stages.formulations.cuts.step_graph import StepGraph
from stowage.stages.ir.errors import IllegalPlanError
from stowage.stages.ir.plan import PlanRow
from stowage.stages.rewrite import Way
from stowage.stages.solve.cuts.found import Schedule
from stowage.stages.solve.program.chain import Execution
from stowage.stages.solve.program.evicting import Evicting
from stowage.stages.solve.program.program import StepProgram
from stowage.stages.solve.program.relief import Relief
from stowage.stages.solver.outcome import SolverSettings

ROUGH_GAP = 5e-4
"""Gap of solves while schedules are looked for, of the whole step's time: most of the time goes to what is below it."""

GAP = 1e-4
"""Gap of the solve that is about the bound alone."""

CLOSE = 2e-4
"""Relative distance to the bound from which on nothing better is looked for."""

SINGLE_CUTS = 4
"""Places for a single cut that are tried at first, where the plan needs most memory."""

SINGLE_SHARE = 0.25
"""Share of the time after which no other place for a single cut is tried."""

ROUNDS = 12
"""Times that cuts are added."""

TOO_SHORT = 0.25
"""Share of the time of the last integer program that the next, larger one must have to be begun."""


class CutWay:
    """Improves the bound of one way, solve by solve.

    Attributes:
        way: the trace and its nodes.
        step: its graph.
        program: its program.
        bound_s: no schedule of the way takes less.
        cuts: the cuts of that bound; none while it is the time of every node once.
        fastest_s: the time of the fastest schedule that is known to fit.
        found: that schedule, where the cuts found it.
    """

    def __init__(
        self, way: Way, program: StepProgram, rows: Sequence[PlanRow], budget_bytes: int, time_s: float | None = None
    ) -> None:
        """Begin with what is known.

        Args:
            way: the trace and its nodes.
            program: its program.
            rows: a plan of the way that fits; none where none is known.
            budget_bytes: of the device.
            time_s: of that plan; by default that of what it computes.
        """
        self.way = way
        self.step = StepGraph.of(way.trace, way.nodes)
        self.program = program
        self._budget_bytes = budget_bytes
        self._level: list[int] = []
        self._known = [r.node for r in rows if r.node >= 0]
        self._peaks = dict[int, int]()
        for row in rows:
            if row.action == "compute":
                self._peaks.setdefault(row.node, row.peak_bytes)
        self.bound_s = self.step.once_s
        self.cuts: tuple[int, ...] = ()
        if time_s is None:
            time_s = sum(way.nodes[n].time_s for n in self._known) if rows else math.inf
        self.fastest_s = time_s
        self.found: Schedule | None = None
        self._building_s = 0.0
        self._integers_s = 0.0
        self._judging_s = 0.0
        self._deadline_s = math.inf
        self._guided_s = 0.0
        self._choice = Choice(self.step)

    kind = "cuts"

    @property
    def name(self) -> str:
        """Return the name of the way that is bounded."""
        return self.way.name

    @property
    def close(self) -> bool:
        """Return whether a schedule is known that is about as fast as the bound."""
        return self.fastest_s <= self.bound_s * (1 + CLOSE)

    def improve(self, deadline_s: float) -> Generator[None]:
        """Solve for one set of cuts after another, until there is nothing to improve or time is over.

        Args:
            deadline_s: on the clock of `time.monotonic`.
        """
        self._deadline_s = deadline_s
        if self.close:
            return
        single = yield from self._single(deadline_s)
        if single is None:
            return
        cuts, gap = [single], ROUGH_GAP
        for _ in range(ROUNDS):
            answer = self._solve(cuts, deadline_s, gap)
            yield
            if answer is None or not answer.runs or self.close:
                return
            began_s = time.monotonic()
            order = self._judged(answer)
            self._judging_s = time.monotonic() - began_s
            if not order:
                return
            cuts = sorted({*cuts, *self._choice.more(cuts, order, self._level, self._budget_bytes)})
            if answer.status != "optimal" or (len(cuts) == len(answer.cuts) and gap == GAP):
                return
            if len(cuts) == len(answer.cuts):
                gap = GAP

    def _single(self, deadline_s: float) -> Generator[None, None, int | None]:
        """Return the node whose cut alone bounds most, by linear relaxations."""
        places = self._choice.hottest(self._peaks, SINGLE_CUTS)
        if not places:
            return None
        bounds: dict[int, float] = {}
        began_s = time.monotonic()
        until_s = began_s + SINGLE_SHARE * (deadline_s - began_s)
        while places:
            for place in places:
                if bounds and time.monotonic() > until_s:
                    return max(bounds, key=lambda n: bounds[n])
                answer = self._solve([place], deadline_s, integral=False)
                if answer is None:
                    return max(bounds, key=lambda n: bounds[n]) if bounds else None
                bounds[place] = answer.bound_s
                yield
            best = max(bounds, key=lambda n: bounds[n])
            places = [n for n in self._choice.beside(best) if n not in bounds]
        return best

    def _solve(
        self, cuts: Sequence[int], deadline_s: float, gap: float = GAP, *, integral: bool = True
    ) -> CutAnswer | None:
        began_s, intervals = time.monotonic(), len(cuts) + 1
        left_s = deadline_s - began_s - self._building_s * intervals - self._judging_s
        if left_s <= (TOO_SHORT * self._integers_s if integral else 0):
            return None
        answer = self._answer(cuts, SolverSettings(left_s, gap), integral=integral)
        self._building_s = max(self._building_s, (time.monotonic() - began_s - answer.wall_s) / intervals)
        self._integers_s = answer.wall_s if integral else self._integers_s
        if answer.bound_s > self.bound_s:
            self.bound_s, self.cuts = answer.bound_s, answer.cuts
        return answer

    def _answer(self, cuts: Sequence[int], settings: SolverSettings, *, integral: bool) -> CutAnswer:
        return solve_cuts(self.step, cuts, self._budget_bytes, settings, integral=integral, known=self._known)

    def _judged(self, answer: CutAnswer) -> list[int]:
        """Return the order that an answer describes, and keep it if it fits and is faster than what is known."""
        order, faster = self._polished(self.step, self.way, self._relief, answer)
        if faster is None:
            faster = self._guided(self.way, self._evicting, answer)
        self._known = faster or self._known
        return order

    @cached_property
    def _evicting(self) -> Evicting:
        return Evicting(self.program)

    @cached_property
    def _relief(self) -> Relief:
        return Relief(self.program)

    def _polished(
        self, step: StepGraph, way: Way, relief: Relief, answer: CutAnswer
    ) -> tuple[list[int], list[int] | None]:
        """Return the order that an answer describes, and one that fits and is faster than what is known, or None.

        Where the former does not fit it is repaired. `_level` says what the former takes, if nothing had to be.
        """
        program = relief.program
        found = [Execution(node, f"interval {interval}") for node, interval in order_of(step, answer)]
        found = program.without_dead(found)
        order, self._level = [e.node for e in found], program.levels(found)
        fits = max(self._level, default=0) <= self._budget_bytes
        if not fits:
            most_s = self.fastest_s - Schedule(way, program, found).least_s
            repaired = relief.relieved(found, self._budget_bytes, most_s, self._deadline_s)
            if repaired is None:
                return order, None
            found = repaired
        found = program.retain_where_possible(found, self._budget_bytes)
        if fits:
            order, self._level = [e.node for e in found], program.levels(found)
        return order, self._taken(Schedule(way, program, found))

    def _guided(self, way: Way, evicting: Evicting, answer: CutAnswer) -> list[int] | None:
        """Return an order that has in memory at the cuts what an answer has, and evicts between them where it must.

        None where it is not faster than what is known, or where no time is left.
        """
        began_s = time.monotonic()
        if began_s + self._guided_s > self._deadline_s:
            return None
        kept = {cut: [s for s, j in answer.keeps if j == number] for number, cut in enumerate(answer.cuts, start=1)}
        order, program = evicting.guided(self._budget_bytes, kept, self.fastest_s), evicting.program
        faster = None
        if order is not None:
            found = program.retain_where_possible(order.executions, self._budget_bytes)
            faster = self._taken(Schedule(way, program, found))
        self._guided_s = time.monotonic() - began_s
        return faster

    def _taken(self, schedule: Schedule) -> list[int] | None:
        """Return the order of a schedule that fits if it is faster than what is known, and keep it; else None.

        The referee has the last word: the rows do not say that within an interval what is made again must be so before
        what it reads is updated.
        """
        if schedule.least_s >= self.fastest_s:
            return None
        try:
            judged = schedule.judged(self._budget_bytes)
        except IllegalPlanError:
            return None
        time_s = judged.time_s if schedule.exchanges else schedule.least_s
        if time_s >= self.fastest_s:
            return None
        self.found, self.fastest_s = schedule, time_s
        return [e.node for e in schedule.executions]
