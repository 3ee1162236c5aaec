"""A known schedule as an answer of the program: every variable has its value in it, and the solver says what it is."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from stowage.stages.formulations.cuts.model import build
from stowage.stages.formulations.cuts.start import Live, start_from
from stowage.stages.formulations.cuts.step_graph import StepGraph
from stowage.stages.solver.milp import solve_milp
from stowage.stages.solver.outcome import SolverSettings


def start_s(
    step: StepGraph,
    cuts: Sequence[int],
    budget: int,
    order: Sequence[int],
    *,
    heavy: Collection[int] = (),
    live: Live | None = None,
) -> float:
    """The time of a schedule in the program that starts from it; infinite where it is no answer of it."""
    model = build(step, cuts, budget, heavy=heavy)
    start_from(model, order, live)
    for variable in model.problem.variables():
        assert variable.varValue is not None, f"{variable.name} has no value in the start"
        variable.lowBound = variable.upBound = variable.varValue
    outcome = solve_milp(model.problem, SolverSettings(20.0))
    return outcome.objective * model.time_unit_s
