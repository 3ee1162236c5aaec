"""Solves the exact choice and reads it; the model is in `model.py`, its rows in `equations.py`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from stowage.stages.formulations.sharding.four_states.equations import build, cover
from stowage.stages.formulations.sharding.four_states.model import FourStates
from stowage.stages.formulations.sharding.four_states.start import begin_with
from stowage.stages.formulations.sharding.memory import State
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
    """Choose the state of every group; an answer that the tolerances of the solver let exceed a budget is cut off.

    Args:
        problem: groups, machine and budgets.
        settings: limits of the solver.
        start: choices within the budgets to begin with; the answer is then no worse in this model.
        solver: which one.
    """
    began_s, bound_s = time.perf_counter(), 0.0
    m = build(FourStates(problem))
    if start is not None:
        begin_with(m, start)
    while (left_s := settings.time_limit_s - (time.perf_counter() - began_s)) > 0:
        limits = replace(settings, time_limit_s=left_s)
        outcome = solve_milp(m.model, limits, solver=solver, warm_start=start is not None)
        bound_s = max(bound_s, outcome.bound * m.time_unit)  # every row so far holds for all that fits
        if not outcome.found:
            return ExactChoice(outcome.status, None, float("inf"), bound_s, time.perf_counter() - began_s)
        chosen = _states(m)
        covers = [states for row in (*m.device_rows, *m.host_rows) if (states := row.cover(chosen))]
        if not covers:
            choices = [GroupChoice(g.group, *state) for g, state in zip(problem.groups, chosen, strict=True)]
            time_s, wall_s = outcome.objective * m.time_unit, time.perf_counter() - began_s
            return ExactChoice(outcome.status, tuple(choices), time_s, min(bound_s, time_s), wall_s)
        for states in covers:
            m.model += cover(m, states)
        if start is not None:
            begin_with(m, start)
    return ExactChoice("unknown", None, float("inf"), bound_s, time.perf_counter() - began_s)


def _states(m: FourStates) -> list[State]:
    """Read the state of every group."""
    return [max(m.costs.states(i), key=lambda s: m.state[i, s].value() or 0.0) for i in range(len(m.problem.groups))]
