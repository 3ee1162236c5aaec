"""Solves the exact choice and reads it; the model is in `model.py`, its rows in `equations.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stowage.stages.formulations.sharding.four_states.equations import build
from stowage.stages.formulations.sharding.four_states.model import FourStates
from stowage.stages.formulations.sharding.four_states.start import begin_with
from stowage.stages.formulations.sharding.problem import ShardingProblem
from stowage.stages.ir.parallel import GroupChoice
from stowage.stages.solver.milp import MilpSolver, solve_milp
from stowage.stages.solver.outcome import SolverSettings, Status


@dataclass(frozen=True)
class ExactChoice:
    """The result of a solve.

    Attributes:
        status: "infeasible" and "optimal" (within the gap asked for) are proofs; "unknown": the limit came first.
        choices: a choice for every group, None unless the status is "optimal" or "feasible".
        time_s: the time of the step that the model gives it.
        bound_s: no choice within the budgets is faster than this, in the same model.
        wall_s: seconds taken.
    """

    status: Status
    choices: tuple[GroupChoice, ...] | None
    time_s: float
    bound_s: float
    wall_s: float


def exact_choice(
    problem: ShardingProblem,
    settings: SolverSettings,
    *,
    start: Sequence[GroupChoice] | None = None,
    solver: MilpSolver = "highs",
) -> ExactChoice:
    """Choose the state of every group.

    Args:
        problem: groups, machine and budgets.
        settings: limits of the solver.
        start: choices within the budgets to begin with; the answer is then no worse in this model.
        solver: which one.
    """
    m = build(FourStates(problem))
    if start is not None:
        begin_with(m, start)
    outcome = solve_milp(m.model, settings, solver=solver, warm_start=start is not None)
    bound_s = max(0.0, outcome.bound * m.time_unit)
    if not outcome.found:
        return ExactChoice(outcome.status, None, float("inf"), bound_s, outcome.wall_s)
    choices = []
    for i, group in enumerate(problem.groups):
        state = max(m.costs.states(i), key=lambda s: m.state[i, s].value() or 0.0)
        choices.append(GroupChoice(group.group, state.on_host, state.keep))
    time_s = outcome.objective * m.time_unit
    return ExactChoice(outcome.status, tuple(choices), time_s, min(bound_s, time_s), outcome.wall_s)
