"""Solves the cut formulation with a lower tier: a lower bound on the period of every schedule."""

from __future__ import annotations

import math
from collections.abc import Sequence

from stowage.stages.formulations.cuts.solve import ROUNDING, CutAnswer
from stowage.stages.formulations.cuts.step_graph import StepGraph
from stowage.stages.formulations.cuts.transfers.below import Below
from stowage.stages.formulations.cuts.transfers.model import build_with_transfers
from stowage.stages.solver.milp import solve_milp
from stowage.stages.solver.outcome import SolverSettings


def solve_with_transfers(
    step: StepGraph,
    cuts: Sequence[int],
    budget_bytes: int,
    below: Below,
    settings: SolverSettings,
    *,
    integral: bool = False,
) -> CutAnswer:
    """Bound the period of every schedule of a step within a budget.

    Args:
        step: the step.
        cuts: nodes, each a strict descendant of the one before, none of them an update that the CPU may do.
        budget_bytes: of the device.
        below: the lower tier.
        settings: limits of the solver; its bound counts whenever it stops.
        integral: solve the integer program; else its linear relaxation, which bounds less and takes less time.
    """
    model = build_with_transfers(step, cuts, budget_bytes, below, integral=integral)
    outcome = solve_milp(model.problem, settings)
    proven = min(outcome.bound, outcome.objective * (1 - settings.gap)) if outcome.found else outcome.bound
    if not integral and outcome.status == "optimal":
        proven = outcome.objective
    bound_s = max(proven * model.time_unit_s * (1 - ROUNDING), model.once_s)
    objective_s = outcome.objective * model.time_unit_s if outcome.found else math.inf
    return CutAnswer(tuple(cuts), outcome.status, bound_s, objective_s, outcome.wall_s)
