"""Times planning, from the model to its program, with and without what is proven on top: cuts, and greedy eviction."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, replace

from stowage.flows.benchmarks.proven.cases import ProvenCase
from stowage.flows.planning.effort import QUICK, Effort
from stowage.flows.planning.step import plan_step

SHARE = 0.5
"""The budget, as `ProvenCase.budget_bytes` has it."""

APART = 1000
"""Budgets grow by one part in so many, so that no plan is found stored."""


@dataclass(frozen=True)
class PlanningRow:
    """Planning of one model, from the trace to the program, with costs and options stored.

    Attributes:
        model: its name for people.
        without_s: the median time without cuts and without greedy eviction.
        with_s: with both, within the share of planning that they may take.
        quick_without_s, quick_with_s: the same with the effort of `quick=True`, which never cuts: without greedy
            eviction, and with it.
    """

    model: str
    without_s: float
    with_s: float
    quick_without_s: float
    quick_with_s: float


def planning_row(label: str, case: ProvenCase, repeats: int = 3) -> PlanningRow:
    """Time all of them in turns.

    Args:
        label: the model's name for people.
        case: the model.
        repeats: plans of each; one more before them fills the stores.
    """
    effort = case.how.effort
    # Costs are those that are stored.
    quick = replace(QUICK, seconds_per_call=effort.seconds_per_call, min_samples=effort.min_samples)
    efforts = {
        "without": replace(effort, cut_seconds=0.0, eviction_rules=0),
        "with": effort,
        "quick without": replace(quick, eviction_rules=0),
        "quick with": quick,
    }
    times_s: dict[str, list[float]] = {name: [] for name in efforts}
    budget_bytes = case.budget_bytes(SHARE)
    for _ in range(repeats + 1):
        for name, each in efforts.items():
            budget_bytes += budget_bytes // APART + 1
            times_s[name].append(_time_s(case, each, budget_bytes))
    return PlanningRow(label, *(statistics.median(times_s[name][1:]) for name in efforts))


def _time_s(case: ProvenCase, effort: Effort, budget_bytes: int) -> float:
    began_s = time.monotonic()
    plan_step(case.step, budget_bytes, replace(case.how, effort=effort))
    return time.monotonic() - began_s
