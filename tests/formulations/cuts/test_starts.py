"""The start from a known schedule is an answer of the program, in whose time nothing is added that it does not take."""

from __future__ import annotations

import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stowage.stages.formulations.cuts.choice import Choice
from stowage.stages.formulations.cuts.domain import Domain
from stowage.stages.formulations.cuts.step_graph import StepGraph
from stowage.stages.ir.errors import Infeasible, ParameterError
from stowage.stages.ir.methods import METHODS
from stowage.stages.ir.trace import TraceTables
from stowage.stages.solve.summary import Solved
from tests.formulations.cuts.drawn import drawn_steps
from tests.formulations.cuts.every_schedule import fastest_schedule
from tests.formulations.cuts.fixed_start import start_s
from tests.formulations.cuts.tiny_budgets import binds, limits_of
from tests.matrix import examples, some
from tests.solve.prepared import Prepared, prepare_trace, prepared_zoo
from tests.solve.synthetic_steps import training_steps

SAME = 1 + 1e-6
"""Times are added up in another order, and counted in the program's unit."""

ALONE = [m.name for m in METHODS if not m.offloads and not m.whole]


def certain(step: StepGraph, cuts: tuple[int, ...]) -> list[int]:
    """The nodes between the cuts that may be heavy ones."""
    first = Domain.of(step, cuts).first
    return [n for n, (earliest, latest) in enumerate(first) if earliest == latest and n not in cuts]


def test_of_the_fastest_schedules_of_tiny_steps() -> None:
    """Within what they need, with every node between the cuts as a heavy one; some run something again."""
    again = 0
    for d in drawn_steps()[:60]:
        for budget in {d.budget, limits_of(d.step).least}:
            schedule = fastest_schedule(d.step, budget)
            if schedule is not None:
                found_s = start_s(d.step, d.cuts, budget, schedule.order, heavy=certain(d.step, d.cuts))
                assert found_s <= schedule.time_s * SAME
                again += binds(d.step, schedule.time_s)
    assert again


def plans_of(prepared: Prepared, budget: int) -> list[Solved]:
    """The plan of every method that makes one."""
    found = []
    for method in ALONE:
        try:
            found.append(prepared.solve(budget, method))
        except (Infeasible, ParameterError):
            continue
    return found


@settings(max_examples=examples(50), deadline=None, suppress_health_check=list(HealthCheck))
@given(training_steps(max_layers=6), st.floats(0, 1), st.data())
def test_of_plans_of_random_steps(trace: TraceTables, share: float, data: st.DataObject) -> None:
    """Of every method, at any chain of cuts on the spine, with any nodes between them as heavy ones."""
    prepared = prepare_trace(trace)
    rich = prepared.solve().summary
    budget = rich.smallest_feasible_bytes + int(share * (rich.device_peak_bytes - rich.smallest_feasible_bytes))
    step = StepGraph.of(trace, prepared.nodes)
    cuts: list[int] = []
    for node in Choice(step).spine:
        if (not cuts or step.precedes(cuts[-1], node)) and data.draw(st.booleans()):
            cuts.append(node)
    may = certain(step, tuple(cuts))
    heavy = data.draw(st.sets(st.sampled_from(may), max_size=8)) if may else set[int]()
    for plan in plans_of(prepared, budget):
        order = [row.node for row in plan.rows if row.node >= 0]
        found_s = start_s(step, cuts, plan.summary.device_peak_bytes, order, heavy=heavy)
        assert found_s <= plan.summary.step_time_s * SAME


@pytest.mark.parametrize("name", some(["lstm", "resnet", "unet"], keep=["unet"]))
def test_of_plans_of_models(name: str) -> None:
    """At the smallest budget and above it, without cuts, with one and with several."""
    prepared = prepared_zoo(name)
    whole = prepared.solve().summary
    least, most = whole.smallest_feasible_bytes, whole.device_peak_bytes
    step = StepGraph.of(prepared.trace, prepared.nodes)
    spine = Choice(step).spine
    for budget in (least, (2 * least + most) // 3):
        for plan in plans_of(prepared, budget):
            order = [row.node for row in plan.rows if row.node >= 0]
            for cuts in ((), spine[:1], spine[:: max(1, len(spine) // 4)]):
                chain = [c for k, c in enumerate(cuts) if not k or step.precedes(cuts[k - 1], c)]
                found_s = start_s(step, chain, plan.summary.device_peak_bytes, order)
                assert math.isfinite(found_s)
                assert found_s <= plan.summary.step_time_s * SAME
