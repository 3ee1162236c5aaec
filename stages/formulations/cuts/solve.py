"""Solves the cut formulation: a lower bound on the time of every schedule, and the answer that it belongs to."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from stowage.stages.formulations.cuts.masked import Masks
from stowage.stages.formulations.cuts.model import build
from stowage.stages.formulations.cuts.start import Live, start_from
from stowage.stages.formulations.cuts.step_graph import StepGraph
from stowage.stages.solver.milp import solve_milp
from stowage.stages.solver.outcome import SolverSettings, Status

ROUNDING = 1e-6
"""Share of every bound that is given up: solvers count with tolerances."""


@dataclass(frozen=True)
class CutAnswer:
    """What a solve says.

    Attributes:
        cuts: g_1 to g_N.
        status: as the solver says; `infeasible` is a proof that no schedule fits.
        bound_s: no schedule of the step takes less; infinite where none fits.
        objective_s: the time of what was found, which may need more memory between the cuts; infinite without.
        wall_s: seconds taken.
        runs: (node, interval) that run, in what was found.
        keeps: (value, cut) that are kept, in what was found.
        held: what counts under masks, by (value, cut), in what was found: of a relaxation a part of it.
    """

    cuts: tuple[int, ...]
    status: Status
    bound_s: float
    objective_s: float
    wall_s: float
    runs: frozenset[tuple[int, int]] = frozenset()
    keeps: frozenset[tuple[int, int]] = frozenset()
    held: Mapping[tuple[int, int], float] = field(default_factory=dict)


def solve_cuts(
    step: StepGraph,
    cuts: Sequence[int],
    budget_bytes: int,
    settings: SolverSettings,
    *,
    heavy: Collection[int] = (),
    integral: bool = True,
    known: Sequence[int] = (),
    live: Live | None = None,
    masks: Masks | None = None,
) -> CutAnswer:
    """Bound the time of every schedule of a step within a budget.

    Args:
        step: the step.
        cuts: nodes, each a strict descendant of the one before.
        budget_bytes: of the device.
        settings: limits of the solver; its bound counts whenever it stops.
        heavy: nodes between the cuts whose memory counts too, see `build`.
        integral: solve the integer program; else its linear relaxation, which bounds less and takes less time.
        known: the nodes of a schedule that fits, in order: the solver's first answer.
        live: what is in memory in it, see `start_from`.
        masks: what of memory counts under some choices of what trains; None where everything does.
    """
    model = build(step, cuts, budget_bytes, heavy=heavy, integral=integral, masks=masks)
    if known:
        start_from(model, known, live)
    outcome = solve_milp(model.problem, settings, warm_start=bool(known))
    unit_s = model.time_unit_s
    # A solver may pass over answers that are better by less than the gap that it was given.
    proven = min(outcome.bound, outcome.objective * (1 - settings.gap)) if outcome.found else outcome.bound
    if not integral and outcome.status == "optimal":
        proven = outcome.objective
    bound_s = max(proven * unit_s * (1 - ROUNDING), model.once_s)
    if not outcome.found:
        return CutAnswer(tuple(cuts), outcome.status, bound_s, math.inf, outcome.wall_s)
    return CutAnswer(
        tuple(cuts),
        outcome.status,
        bound_s,
        outcome.objective * unit_s,
        outcome.wall_s,
        frozenset(model.domain.sure_runs | {key for key, v in model.run.items() if (v.varValue or 0.0) > 0.5}),
        frozenset(model.domain.sure_keeps | {key for key, v in model.kept.items() if (v.varValue or 0.0) > 0.5}),
        model.held_parts() if masks is not None else {},
    )
