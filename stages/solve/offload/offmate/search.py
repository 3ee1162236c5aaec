"""Searches for OffMate's plans: O-ILP, rounding, the referee, and O-ILP again with what the referee found."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace

from stowage.stages.formulations.offload.bounds import lower_bound
from stowage.stages.formulations.offload.o_ilp.answers import OIlpAnswer, OIlpSolution
from stowage.stages.formulations.offload.o_ilp.model import OIlpLimits
from stowage.stages.formulations.offload.o_ilp.solve import o_ilp
from stowage.stages.formulations.offload.problem import OffloadProblem
from stowage.stages.formulations.offload.rounding.rounding import Refits, RoundedPlan, round_o_ilp
from stowage.stages.solve.offload.offloader import Offloader
from stowage.stages.solve.offload.offmate.answer import Translator
from stowage.stages.solve.offload.offmate.choices import choices_of
from stowage.stages.solve.offload.offmate.problem import ChainProblem
from stowage.stages.solve.proposal import Decision, JudgedPlan, Proposal, Proposals, Task
from stowage.stages.solver.outcome import SolverSettings

ATTEMPTS = 4
"""Times to ask O-ILP again with less memory.

The referee counts row by row what O-ILP counts step by step, and may find more.
"""

CLOSE_TO_O_ILP = 1.02
"""A plan within this factor of O-ILP's own is good enough."""

FAR_FROM_O_ILP = 1.05
"""A plan slower than O-ILP's own by this factor is rounded in the other way too."""

NOTICEABLE_WAIT = 1e-3
"""Share of an iteration that computing may wait for one update by the CPU."""

ROUNDINGS_PER_ANSWER = 4
"""Roundings of one answer; each but the first without updates by the CPU that were too slow before."""

SOLVES_PER_LIMIT = 2.5
"""Once a plan fits, O-ILP is asked again only until its solves took this many times the limit of one."""

TRANSFER_REACH_STEPS = 8
"""Steps that a transfer may be away from the use that it follows or serves, in long chains.

Such problems are solved ten times faster, and on the models tried with the same objective.
"""

MUCH_SLOWER = 1.01
"""Of two ways to place reloads, one that is slower by this factor is not tried in further roundings of an answer."""

Judged = Generator[Proposal, JudgedPlan | None, list[JudgedPlan]]
"""Proposals, and at the end the plans among them that the referee accepted."""

Placed = Generator[Proposal, JudgedPlan | None, dict[bool, JudgedPlan]]
"""The same, by whether activations are reloaded early."""


def reach_of(steps: int) -> int | None:
    """Return how far a transfer may be from its use in a cycle of so many steps; None means no limit."""
    return TRANSFER_REACH_STEPS if steps > 3 * TRANSFER_REACH_STEPS else None


@dataclass(frozen=True)
class OffMate:
    """Proposes O-ILP's plans; where the budget has none, those for the smallest budget that has.

    Attributes:
        offloader: the program and its lower tier.
        preprint: give blocks the three options that the OffMate preprint gives them.
        only_better: others have a plan with transfers that fits, so that O-ILP is not asked again and again for one.
    """

    offloader: Offloader
    preprint: bool = False
    only_better: bool = False

    def propose(self, task: Task) -> Proposals:
        """Propose plans of several searches, each only while the plans so far are far from what O-ILP can do."""
        offloader, settings = self.offloader, task.request.o_ilp_limits
        search = _Search(offloader, task.budget_bytes, settings, self.preprint, only_better=self.only_better)
        yield from search.run()
        others: list[_Search] = []
        if offloader.lower_tier.cpu_update_bytes_per_s:
            # A plan without updates on the CPU may be better once tensors are whole.
            lower_tier = replace(offloader.lower_tier, cpu_update_bytes_per_s=0.0)
            without = Offloader(offloader.program, offloader.chain, lower_tier)
            others.append(_Search(without, task.budget_bytes, settings, self.preprint, only_better=self.only_better))
        if not self.preprint:
            # So may a plan from fewer options: other updates are fractions then.
            others.append(_Search(offloader, task.budget_bytes, settings, preprint=True, only_better=self.only_better))
        best_s, spent_s = search.best_s, search.spent_s
        for other in others[: max(task.request.o_ilp_searches, 1) - 1]:
            fits = best_s < math.inf or self.only_better
            too_long = fits and spent_s > SOLVES_PER_LIMIT * settings.time_limit_s
            if best_s > search.bound_s * CLOSE_TO_O_ILP and not too_long:
                other.rates_bound_s = search.rates_bound_s  # plans of fewer means are plans of all
                yield from other.run()
                best_s = min(best_s, other.best_s)
                spent_s += other.spent_s


class _Search:
    """Asks O-ILP, and asks again with what the referee found.

    Attributes:
        best_s: time of the best plan within the budget so far.
        bound_s: no plan of these options is faster, as O-ILP counts.
        fractional_s: O-ILP's time for the whole budget.
        rates_bound_s: lower bound from computing and the rates of the tiers within the budget.
        spent_s: seconds of O-ILP's solves.
    """

    def __init__(
        self,
        offloader: Offloader,
        device_budget_bytes: int,
        settings: SolverSettings,
        preprint: bool,
        *,
        only_better: bool = False,
    ) -> None:
        self._offloader = offloader
        self._problem = ChainProblem(offloader, choices_of(offloader, preprint=preprint))
        self._translator = Translator(self._problem)
        self._budget_bytes = device_budget_bytes
        self._settings = settings
        self._only_better = only_better
        self.best_s = math.inf
        self.bound_s = 0.0
        self.fractional_s = 0.0
        self.spent_s = 0.0
        self.rates_bound_s = lower_bound(self._problem.within(device_budget_bytes)).total_s

    def run(self) -> Proposals:
        """Propose all plans."""
        budget_bytes = asked_bytes = self._budget_bytes
        limits = OIlpLimits(reach=reach_of(2 * len(self._offloader.chain.blocks)))
        for _ in range(ATTEMPTS):
            problem = self._problem.within(asked_bytes)
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
            found: list[JudgedPlan] = []
            refits = Refits()
            for smoothed, close in ((False, CLOSE_TO_O_ILP), (True, FAR_FROM_O_ILP)):
                if self.best_s > answer.solution.objective_s * close:
                    found += yield from self._rounded(problem, answer, answer.solution, refits, limits.reach, smoothed)
                    self.best_s = min([self.best_s, *(p.time_s for p in found if self._fits(p))])
            # If no plan fits yet, ask for less by the smallest excess; otherwise by the largest, to admit plans that
            # reload activations early too.
            closest = min if math.isinf(self.best_s) else max
            excess = closest((p.peak_bytes for p in found), default=0) - budget_bytes
            good = self.best_s <= answer.solution.objective_s * CLOSE_TO_O_ILP
            fits = self.best_s < math.inf or self._only_better
            late = fits and self.spent_s > SOLVES_PER_LIMIT * self._settings.time_limit_s
            if not feasible or excess <= 0 or good or late or asked_bytes < budget_bytes // 2:
                return
            asked_bytes -= excess

    def _ask(self, problem: OffloadProblem, limits: OIlpLimits) -> OIlpAnswer:
        answer = o_ilp(problem, self._settings, limits=limits)
        self.spent_s += answer.wall_s
        return answer

    def _rounded(
        self,
        problem: OffloadProblem,
        answer: OIlpAnswer,
        solution: OIlpSolution,
        refits: Refits,
        reach: int | None,
        smoothed: bool,
    ) -> Judged:
        """Propose plans of whole tensors.

        While computing waits for updates by the CPU, propose plans again without those.
        """
        found: list[JudgedPlan] = []
        barred: frozenset[str] = frozenset()
        decision = self._decision(answer)
        ways: Sequence[bool] = (True, False)
        for _ in range(ROUNDINGS_PER_ANSWER):
            rounded = round_o_ilp(
                problem, solution, self._settings, reach=reach, smoothed=smoothed, barred=barred, refits=refits
            )
            placed = yield from self._placed(rounded, decision, ways)
            found += placed.values()
            ways = _not_much_slower(placed)
            slow = barred.union(self._problem.name_of[s] for p in placed.values() for s in self._slow_updates(p))
            if slow == barred:
                break
            barred = slow
        return found

    def _placed(self, rounded: RoundedPlan, decision: Decision, ways: Sequence[bool]) -> Placed:
        """Propose a rounded plan with activations reloaded early and late, and return what the referee accepts.

        Args:
            rounded: the plan.
            decision: how it was made.
            ways: whether activations are reloaded early, for each plan that is proposed.
        """
        accepted: dict[bool, JudgedPlan] = {}
        for early in ways:
            transfers, lower_tier, executions = self._translator.transfers(rounded, early=early)
            verdict = yield replace(
                self._offloader.proposal("offmate", executions, transfers, lower_tier, decision),
                wanted_on_disk=self._translator.on_disk(rounded),
                hide_at_once=True,
                fractional_s=self.fractional_s,
                rates_bound_s=self.rates_bound_s,
            )
            if verdict is not None:
                accepted[early] = verdict
        return accepted

    def _decision(self, answer: OIlpAnswer) -> Decision:
        limits = self._settings
        solver = f"o_ilp, {answer.solver}"
        return Decision(solver, answer.status, answer.gap, limits.time_limit_s, limits.seed)

    def _fits(self, plan: JudgedPlan) -> bool:
        return plan.peak_bytes <= self._budget_bytes

    def _slow_updates(self, plan: JudgedPlan) -> set[int]:
        """Return the parameters for whose update by the CPU computing waits."""
        updated = {s.storage for s in plan.steps if s.kind == "update"}
        if not plan.hidden or not updated:
            return set()
        waiting: set[int] = set()
        updating = set(plan.state.updating)
        for step, (start_s, end_s) in zip(plan.steps, plan.outcome.times):
            if step.kind == "update":
                updating.add(step.storage)
            elif step.kind == "wait" and step.storage in updating:
                updating.discard(step.storage)
                if end_s - start_s > NOTICEABLE_WAIT * plan.outcome.time_s:
                    waiting.add(step.storage)
        return waiting


def _not_much_slower(placed: Mapping[bool, JudgedPlan]) -> tuple[bool, ...]:
    """Return the ways to place reloads that are worth another try; all where plans were not hidden or not accepted."""
    if len(placed) < 2 or not all(p.hidden for p in placed.values()):
        return (True, False)
    fastest_s = min(p.time_s for p in placed.values())
    return tuple(early for early, plan in placed.items() if plan.time_s <= fastest_s * MUCH_SLOWER)
