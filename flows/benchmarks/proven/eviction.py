"""Compares plans with and without greedy eviction, on the same costs: what fits, and how long a step takes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from stowage.flows.benchmarks.proven.cases import ProvenCase
from stowage.flows.planning.step import solve_costed
from stowage.stages.ir.errors import Infeasible
from stowage.stages.ir.plan import PlanSummary
from stowage.stages.solve import Known

MODELS = ("unet", "regnet")
"""The models that are compared."""

SHARE = 0.3
"""The budget, as `ProvenCase.budget_bytes` has it."""


@dataclass(frozen=True)
class EvictionRow:
    """Plans of one model within one budget, without cuts.

    Attributes:
        model: its name for people.
        budget: the budget for people.
        budget_bytes: the budget.
        without_s, with_s: the predicted time of a step without and with greedy eviction; None where no plan fits.
    """

    model: str
    budget: str
    budget_bytes: int
    without_s: float | None
    with_s: float | None


def eviction_rows(label: str, case: ProvenCase) -> list[EvictionRow]:
    """Plan within the share, and within the smallest budgets for which a plan is found without and with it.

    Args:
        label: the model's name for people.
        case: the model.
    """
    without, with_it = _Planner(case, 0), _Planner(case, case.how.effort.eviction_rules)
    budgets = {
        f"{SHARE:.0%}": case.budget_bytes(SHARE),
        "smallest without": without.smallest_bytes(),
        "smallest with": with_it.smallest_bytes(),
    }
    return [EvictionRow(label, name, b, without.time_s(b), with_it.time_s(b)) for name, b in budgets.items()]


class _Planner:
    """Plans one model with so many rules of eviction, and without cuts."""

    def __init__(self, case: ProvenCase, rules: int) -> None:
        self._case, self._known = case, Known()
        self._how = replace(case.how, effort=replace(case.how.effort, eviction_rules=rules, cut_seconds=0.0))

    def smallest_bytes(self) -> int:
        try:
            self._plan(1)
        except Infeasible as infeasible:
            return infeasible.smallest_feasible_bytes
        return 1

    def time_s(self, budget_bytes: int) -> float | None:
        try:
            return self._plan(budget_bytes).step_time_s
        except Infeasible:
            return None

    def _plan(self, budget_bytes: int) -> PlanSummary:
        known = self._known.part(self._how.method)
        return solve_costed(self._case.costed, budget_bytes, self._how, known=known)[0].summary
