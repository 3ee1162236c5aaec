"""Plans one model within one budget, and says how far plans are from the bound."""

from __future__ import annotations

from dataclasses import dataclass, replace

from stowage.flows.benchmarks.proven.cases import ProvenCase
from stowage.flows.planning.step import plan_step, solve_costed
from stowage.stages.ir.errors import Infeasible, ParameterError
from stowage.stages.ir.plan import PlanSummary
from stowage.stages.solve import Known, Solved

COMPARED = {"Rotor": "rotor", "Chen": "chen_sqrt"}
"""Name for people -> the method that makes its plan, predicted as ours are."""


@dataclass(frozen=True)
class Cell:
    """One way to run one model within one budget.

    Attributes:
        model: its name for people.
        budget: the budget for people: `65%`, `smallest`, or who was measured to take that much.
        who: whose plan or point it is.
        budget_bytes: the budget; -1 where nothing of this model fits it.
        time_s: predicted time of a step, or for measured points their overhead on top of keeping everything.
        bound_s: no schedule within the budget takes less.
        over_bound: time over bound.
        status: as the plan's summary has it; `measured` for points of others.
        cuts: number of cuts of the bound.
        seconds: time that the bound took, and the search for schedules by it; 0 for others.
        fit_over_bound: the same as `over_bound` of the plan that `fit` makes, which lets both take a share of the time
            that planning took until then, with costs and options stored; 0 for others.
    """

    model: str
    budget: str
    who: str
    budget_bytes: int
    time_s: float = 0.0
    bound_s: float = 0.0
    over_bound: float = 0.0
    status: str = ""
    cuts: int = 0
    seconds: float = 0.0
    fit_over_bound: float = 0.0


class Prover:
    """Makes the cells of one model."""

    def __init__(self, label: str, case: ProvenCase) -> None:
        self._label = label
        self._case = case
        self._known = Known()

    def smallest_bytes(self) -> int:
        """Return the smallest budget for which our rules find a plan."""
        try:
            self._plan("auto", 1, 0.0)
        except Infeasible as infeasible:
            return infeasible.smallest_feasible_bytes
        return 1

    def cells(self, budget: str, budget_bytes: int) -> list[Cell]:
        """Return ours, Rotor's and Chen's plans within a budget; theirs are left out where they do not fit."""
        try:
            solved = self._solved("auto", budget_bytes, self._case.how.effort.cut_seconds)
        except Infeasible:
            return [Cell(self._label, budget, "Stowage", -1, status="none fits")]
        ours = solved.summary
        cell = replace(self._cell(budget, "Stowage", ours, ours), seconds=solved.proving_s)
        found = [replace(cell, fit_over_bound=self._fit_over_bound(budget_bytes))]
        for who, method in COMPARED.items():
            try:
                found.append(self._cell(budget, who, self._plan(method, budget_bytes, 0.0), ours))
            except (Infeasible, ParameterError):
                continue
        return found

    def measured(self, who: str, budget_bytes: int, overhead: float) -> list[Cell]:
        """Return a point that was measured of somebody else, and our plan within its peak."""
        try:
            ours = self._plan("auto", budget_bytes, self._case.how.effort.cut_seconds)
        except Infeasible:
            return []
        time_s = self._case.keep_all_s * (1 + overhead)
        theirs = replace(self._cell(who, who, ours, ours), time_s=time_s, status="measured", cuts=len(ours.bound_cuts))
        return [
            self._cell(who, "Stowage", ours, ours),
            replace(theirs, over_bound=time_s / ours.bound_s),
        ]

    def _fit_over_bound(self, budget_bytes: int) -> float:
        """Plan from the model on, as `fit` does; within a byte more, so that no plan is found stored."""
        summary = plan_step(self._case.step, budget_bytes + 1, self._case.how).summary
        return summary.step_time_s / summary.bound_s

    def _cell(self, budget: str, who: str, plan: PlanSummary, bounded: PlanSummary) -> Cell:
        return Cell(
            model=self._label,
            budget=budget,
            who=who,
            budget_bytes=bounded.device_budget_bytes,
            time_s=plan.step_time_s,
            bound_s=bounded.bound_s,
            over_bound=plan.step_time_s / bounded.bound_s,
            status=plan.status,
            cuts=len(bounded.bound_cuts),
        )

    def _plan(self, method: str, budget_bytes: int, cut_seconds: float) -> PlanSummary:
        return self._solved(method, budget_bytes, cut_seconds).summary

    def _solved(self, method: str, budget_bytes: int, cut_seconds: float) -> Solved:
        """Plan with all of the seconds for cuts."""
        how = replace(self._case.how, method=method)
        known = self._known.part(method)
        return solve_costed(self._case.costed, budget_bytes, how, known=known, cut_seconds=cut_seconds)[0]
