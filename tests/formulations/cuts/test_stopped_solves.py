"""What a solve has proven when it is stopped, or ends at a wide gap, is a bound; what it has found is none."""

from __future__ import annotations

import pytest

from stowage.stages.formulations.cuts.choice import Choice
from stowage.stages.formulations.cuts.solve import solve_cuts
from stowage.stages.formulations.cuts.step_graph import StepGraph
from stowage.stages.solve.cuts.transfers import peaks_of
from stowage.stages.solver.outcome import SolverSettings
from tests.formulations.cuts.drawn import drawn_steps
from tests.formulations.cuts.every_schedule import fastest, fastest_schedule
from tests.formulations.cuts.tiny_budgets import limits_of
from tests.matrix import some
from tests.solve.prepared import prepared_zoo

SAME = 1 + 1e-12
"""The same times may be added up in another order."""

AT_ONCE = SolverSettings(time_limit_s=0.0)
"""Stopped before anything is proven: all that it has is the schedule that it was given."""


@pytest.mark.parametrize("settings", [SolverSettings(20.0, 0.3), AT_ONCE], ids=["a wide gap", "stopped at once"])
def test_of_tiny_steps_that_start_from_the_schedule_of_a_smaller_budget(settings: SolverSettings) -> None:
    slower = 0
    for d in drawn_steps()[:60]:
        limits = limits_of(d.step)
        least = fastest_schedule(d.step, limits.least)
        assert least is not None
        for budget in {max(d.budget, limits.least), (d.budget + limits.enough) // 2}:
            optimum_s = fastest(d.step, budget)
            found = solve_cuts(d.step, d.cuts, budget, settings, known=least.order)
            assert found.bound_s <= optimum_s * SAME
            slower += bool(found.runs) and found.objective_s > optimum_s * 1.001
    assert slower or settings is not AT_ONCE, "what was found was as fast as the fastest schedule each time"


@pytest.mark.parametrize(
    ("name", "share"),
    some(
        [("gpt2", 0.2), ("resnet", 0.2), ("resnet", 0.5), ("unet", 0.2), ("unet", 0.5)],
        keep=[("resnet", 0.2), ("unet", 0.2), ("unet", 0.5)],
    ),
)
def test_of_models_whose_solves_end_with_answers_that_are_slower_than_plans(name: str, share: float) -> None:
    """Whoever took what was found for a bound would say that there is no such plan."""
    prepared = prepared_zoo(name)
    whole = prepared.solve().summary
    least, most = whole.smallest_feasible_bytes, whole.device_peak_bytes
    budget = least + int(share * (most - least))
    best, leanest = prepared.solve(budget), prepared.solve(least)
    step = StepGraph.of(prepared.trace, prepared.nodes)
    cuts = Choice(step).hottest(peaks_of(step), 1)
    known = [row.node for row in leanest.rows if row.node >= 0]
    slower = 0
    for settings in (SolverSettings(20.0, 0.1), SolverSettings(20.0, 0.3), AT_ONCE):
        found = solve_cuts(step, cuts, budget, settings, known=known)
        assert found.bound_s <= best.summary.step_time_s * SAME
        slower += found.objective_s > best.summary.step_time_s * 1.001
    assert slower > 1
