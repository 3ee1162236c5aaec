"""OffMate's search: O-ILP, rounding, the referee, and O-ILP again with what the referee found."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from stowage.stages.formulations.offload.bounds import lower_bound
from stowage.stages.formulations.offload.o_ilp.model import OIlpLimits
from stowage.stages.formulations.offload.o_ilp.solve import OIlpAnswer, OIlpSolution, o_ilp
from stowage.stages.formulations.offload.problem import OffloadProblem
from stowage.stages.formulations.offload.rounding.rounding import RoundedPlan, round_o_ilp
from stowage.stages.ir.errors import IllegalPlanError
from stowage.stages.solve.offload.offloader import Offloader, OffloadPlan
from stowage.stages.solve.offload.offmate.offmate import OffMate
from stowage.stages.solver.outcome import SolverSettings

ATTEMPTS = 4
"""The referee counts row by row what O-ILP counts step by step: when it finds more, O-ILP is asked again with less."""

CLOSE = 1.02
"""A plan within this factor of O-ILP's own is good enough."""

SMOOTHED = 1.05
"""A plan worse than this is rounded in the other way too."""

NOTICEABLE = 1e-3
"""Share of an iteration that computing may wait for one update by the CPU."""

BARRINGS = 4
"""Roundings of one answer; each but the first without updates that were too slow before."""

SOLVES = 4
"""Where a plan fits, O-ILP is asked again only until its solves took this many times the limit of one."""

REACH = 8
"""In long chains a transfer happens at most this many steps from the use that it follows or serves: ten times faster to
solve, and on the models tried with the same objective."""


def plans(
    offloader: Offloader, device_budget_bytes: int, settings: SolverSettings, *, preprint: bool = False
) -> Iterator[OffloadPlan]:
    """O-ILP's plans that the referee accepts, their copies hidden where they are within the budget.

    Where the budget has none, those for the smallest budget that has. See `OffMate` for `preprint`.
    """
    search = _Search(offloader, device_budget_bytes, settings, preprint)
    yield from search.run()
    others: list[_Search] = []
    if offloader.below.cpu_update_bytes_per_s:
        # A plan without updates on the CPU may be better once tensors are whole.
        without = Offloader(offloader.program, offloader.chain, replace(offloader.below, cpu_update_bytes_per_s=0.0))
        others.append(_Search(without, device_budget_bytes, settings, preprint))
    if not preprint:
        # So may one from fewer options: fractions of updates fall otherwise.
        others.append(_Search(offloader, device_budget_bytes, settings, preprint=True))
    best_s = search.best_s
    spent_s = search.spent_s
    for other in others:
        if best_s > search.bound_s * CLOSE and not (best_s < math.inf and spent_s > SOLVES * settings.time_limit_s):
            yield from other.run()
            best_s = min(best_s, other.best_s)
            spent_s += other.spent_s


class _Search:
    """Asks O-ILP, and asks again with what the referee found.

    Attributes:
        best_s: of the plans within the budget so far.
        bound_s: no plan of these options is faster, as O-ILP counts.
        fractional_s: O-ILP's time for the whole budget.
        rates_bound_s: what computing and the rates of the tiers allow within the budget.
        spent_s: in O-ILP's solves.
    """

    def __init__(
        self, offloader: Offloader, device_budget_bytes: int, settings: SolverSettings, preprint: bool
    ) -> None:
        self._offloader = offloader
        self._offmate = OffMate(offloader, settings, preprint=preprint)
        self._budget_bytes = device_budget_bytes
        self._settings = settings
        self.best_s = math.inf
        self.bound_s = 0.0
        self.fractional_s = 0.0
        self.spent_s = 0.0
        self.rates_bound_s = lower_bound(self._offmate.problem(device_budget_bytes)).total_s

    def run(self) -> Iterator[OffloadPlan]:
        """All plans."""
        budget_bytes = asked_bytes = self._budget_bytes
        count = len(self._offloader.chain.blocks)
        limits = OIlpLimits(reach=REACH if 2 * count > 3 * REACH else None)
        for _ in range(ATTEMPTS):
            problem = self._offmate.problem(asked_bytes)
            answer = self._ask(problem, limits)
            feasible = answer.solution is not None
            if not feasible and answer.smallest_budget_bytes is not None:
                asked_bytes = answer.smallest_budget_bytes
                problem = replace(problem, machine=replace(problem.machine, device_bytes=asked_bytes))
                answer = self._ask(problem, limits)
            if answer.solution is None:
                return
            if not self.fractional_s:
                self.bound_s, self.fractional_s = answer.bound_s, answer.solution.objective_s
            found: list[OffloadPlan] = []
            for smoothed, close in ((False, CLOSE), (True, SMOOTHED)):
                if self.best_s > answer.solution.objective_s * close:
                    found += self._rounded(problem, answer.solution, limits.reach, smoothed=smoothed)
                    self.best_s = min([self.best_s, *(p.outcome.time_s for p in found if self._fits(p))])
            for plan in found:
                yield replace(plan, fractional_s=self.fractional_s, rates_bound_s=self.rates_bound_s)
            # With less asked for, the leanest plan fits; if one fits already, those that bring activations early.
            closest = min if math.isinf(self.best_s) else max
            excess = closest((p.outcome.peak_bytes for p in found), default=0) - budget_bytes
            good = self.best_s <= answer.solution.objective_s * CLOSE
            late = self.best_s < math.inf and self.spent_s > SOLVES * self._settings.time_limit_s
            if not feasible or excess <= 0 or good or late or asked_bytes < budget_bytes // 2:
                return
            asked_bytes -= excess

    def _ask(self, problem: OffloadProblem, limits: OIlpLimits) -> OIlpAnswer:
        """O-ILP's answer; where time is over before it is within the gap, its relaxation's with rounded options, if
        that is faster."""
        answer = o_ilp(problem, self._settings, limits=limits)
        self.spent_s += answer.wall_s
        if answer.status in ("unknown", "feasible"):
            rounded = o_ilp(problem, self._settings, limits=limits, method="relax_and_round")
            self.spent_s += rounded.wall_s
            bound_s = max(answer.bound_s, rounded.bound_s)
            answer = replace(min(answer, rounded, key=_objective_s), bound_s=bound_s)
        return answer

    def _fits(self, plan: OffloadPlan) -> bool:
        return plan.outcome.peak_bytes <= self._budget_bytes

    def _rounded(
        self, problem: OffloadProblem, solution: OIlpSolution, reach: int | None, *, smoothed: bool
    ) -> list[OffloadPlan]:
        """Plans of whole tensors; again without updates by the CPU that computing waits for, while there are such."""
        found: list[OffloadPlan] = []
        barred: frozenset[str] = frozenset()
        for _ in range(BARRINGS):
            rounded = round_o_ilp(problem, solution, self._settings, reach=reach, smoothed=smoothed, barred=barred)
            placed = list(self._placed(rounded))
            found += placed
            slow = barred.union(str(s) for p in placed for s in self._slow_updates(p))
            if slow == barred:
                break
            barred = slow
        return found

    def _placed(self, rounded: RoundedPlan) -> Iterator[OffloadPlan]:
        """What the referee accepts of a rounded plan, with copies as well hidden as the budget allows."""
        for early in (True, False):
            moves, below, executions = self._offmate.moves(rounded, early=early)
            try:
                on_disk = self._offmate.on_disk(rounded)
                plan = self._offloader.plan("offmate", executions, moves, below, on_disk)
            except IllegalPlanError:
                continue
            yield self._offloader.shifted(plan, self._budget_bytes) if self._fits(plan) else plan

    def _slow_updates(self, plan: OffloadPlan) -> set[int]:
        """Parameters of which computing waits for the update by the CPU."""
        updated = {s.storage for s in plan.steps if s.kind == "update"}
        if not plan.hidden or not updated:
            return set()
        waiting: set[int] = set()
        updating = set(plan.state.updating)
        for step, row in zip(plan.steps, plan.outcome.rows):
            if step.kind == "update":
                updating.add(step.storage)
            elif step.kind == "wait" and step.storage in updating:
                updating.discard(step.storage)
                if row.end_s - row.start_s > NOTICEABLE * plan.outcome.time_s:
                    waiting.add(step.storage)
        return waiting


def _objective_s(answer: OIlpAnswer) -> float:
    return math.inf if answer.solution is None else answer.solution.objective_s
