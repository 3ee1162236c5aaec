"""No plan that the referee accepts is faster than the bound by cuts, whoever made it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stowage.stages.formulations.cuts.choice import Choice
from stowage.stages.formulations.cuts.domain import Domain
from stowage.stages.formulations.cuts.solve import solve_cuts
from stowage.stages.formulations.cuts.step_graph import StepGraph
from stowage.stages.ir.errors import Infeasible, ParameterError
from stowage.stages.ir.methods import METHODS
from stowage.stages.ir.plan import PlanRow
from stowage.stages.ir.trace import TraceTables
from stowage.stages.solve.cuts import way as way_module
from stowage.stages.solve.cuts.proven import seconds_of
from stowage.stages.solve.cuts.way import CutWay
from stowage.stages.solve.program.of_trace import program_of
from stowage.stages.solve.request import PlanRequest
from stowage.stages.solve.summary import Solved
from stowage.stages.solve.time_share import LEAST_SECONDS
from stowage.stages.solve.variants import Variant, solve_variants
from stowage.stages.solver.outcome import SolverSettings
from tests.matrix import examples, some
from tests.solve.cuts.unclamped import bounds_as_proven
from tests.solve.prepared import Prepared, prepare_trace, prepared_zoo
from tests.solve.synthetic_steps import training_steps

SAME = 1 + 1e-12
"""The same times may be added up in another order."""

ALONE = [m.name for m in METHODS if not m.offloads and not m.whole]


def _plans(prepared: Prepared, budget: int) -> list[Solved]:
    found = []
    for method in ALONE:
        try:
            found.append(prepared.solve(budget, method))
        except (Infeasible, ParameterError):
            continue
    return found


def _peaks(rows: Sequence[PlanRow]) -> dict[int, int]:
    found: dict[int, int] = {}
    for row in rows:
        if row.action == "compute":
            found.setdefault(row.node, row.peak_bytes)
    return found


@settings(max_examples=examples(25), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(training_steps(max_layers=6), st.floats(0, 1), st.data())
def test_of_random_steps(trace: TraceTables, share: float, data: st.DataObject) -> None:
    """At any chain of cuts on the spine, with any nodes between them as heavy ones, relaxed and of integers."""
    prepared = prepare_trace(trace)
    rich = prepared.solve().summary
    budget = rich.smallest_feasible_bytes + int(share * (rich.device_peak_bytes - rich.smallest_feasible_bytes))
    step = StepGraph.of(trace, prepared.nodes)
    plans = _plans(prepared, budget)
    cuts: list[int] = []
    for node in Choice(step).spine:
        if (not cuts or step.precedes(cuts[-1], node)) and data.draw(st.booleans()):
            cuts.append(node)
    certain = [n for n, (first, last) in enumerate(Domain.of(step, cuts).first) if first == last and n not in cuts]
    heavy = data.draw(st.sets(st.sampled_from(certain), max_size=8)) if certain else set[int]()
    for integral in (True, False):
        found = solve_cuts(step, cuts, budget, SolverSettings(10.0), heavy=heavy, integral=integral)
        assert found.status != "infeasible"
        for plan in plans:
            assert plan.summary.step_time_s * SAME >= found.bound_s


@pytest.mark.parametrize(
    "name", some(["gpt2", "unet", "lstm", "resnet", "transformer"], keep=["gpt2", "lstm", "resnet"])
)
@pytest.mark.parametrize("optimizer", some(["AdamW", ""], keep=["AdamW"]))
def test_of_models(name: str, optimizer: str) -> None:
    """Every method at several budgets, with the cuts that planning itself makes; and none of its plans is slower."""
    prepared = prepared_zoo(name, optimizer)
    whole = prepared.solve().summary
    least, most = whole.smallest_feasible_bytes, whole.device_peak_bytes
    above_once = 0
    for budget in (least, (3 * least + most) // 4, (least + most) // 2):
        plans = _plans(prepared, budget)
        auto = next(p for p in plans if p.summary.method != "rotor")
        program = program_of(prepared.trace, prepared.nodes)
        way = CutWay(Variant("plain", prepared.trace, prepared.nodes, prepared.blocks), program, auto.rows, budget)
        for _ in way.improve(time.monotonic() + 10):
            assert all(plan.summary.step_time_s * SAME >= way.bound_s for plan in plans)
        above_once += bool(way.cuts)
        assert way.fastest_s <= auto.summary.step_time_s * SAME
    assert above_once


def test_a_plan_states_its_bound_and_is_never_slower_for_it() -> None:
    """The summary has kind, cuts and value, and the referee accepts what cuts have found."""
    prepared = prepared_zoo("unet")
    whole = prepared.solve().summary
    variants = [Variant("plain", prepared.trace, prepared.nodes, prepared.blocks)]
    methods = set[str]()
    for share in (0.0, 0.2, 0.4, 0.7, 1.0):
        least, most = whole.smallest_feasible_bytes, whole.device_peak_bytes
        request = PlanRequest(least + int(share * (most - least)), slots=100)
        before = solve_variants(variants, prepared.options, request).summary
        with bounds_as_proven() as bounds:
            solved = solve_variants(variants, prepared.options, replace(request, cut_seconds=10.0))
        after = solved.summary
        prepared.judge(solved, request.device_budget_bytes)
        assert (before.bound_s, before.bound_kind, before.bound_cuts) == (0.0, "", ())
        assert after.lower_bound_s <= after.bound_s * SAME
        assert after.step_time_s <= before.step_time_s
        plans = [after, *(p.summary for p in _plans(prepared, request.device_budget_bytes))]
        assert bounds
        assert max(bounds) <= min(plan.step_time_s for plan in plans) * SAME
        assert after.bound_s == pytest.approx(min(bounds), rel=1e-12)
        assert after.gap == pytest.approx(1 - after.bound_s / after.step_time_s)
        assert after.bound_kind == ("cuts" if after.bound_cuts else "once")
        methods.add(after.method)
    assert "cuts" in methods, "no schedule by cuts was faster at any budget"


def test_cuts_take_a_share_of_the_time_of_planning() -> None:
    """At most what was asked for, and at least what one cut of a small step takes."""
    request = PlanRequest(1, cut_seconds=5.0)
    assert seconds_of(request, 100.0) == 5.0
    took = {s: seconds_of(replace(request, planning_since_s=100.0 - s), 100.0) for s in (0.0, 0.5, 10.0, 50.0, 99.0)}
    assert took == {0.0: LEAST_SECONDS, 0.5: LEAST_SECONDS, 10.0: pytest.approx(1.2), 50.0: 5.0, 99.0: 5.0}
    assert seconds_of(replace(request, cut_seconds=0.1, planning_since_s=0.0), 1.0) == 0.1


def test_a_schedule_that_the_referee_refuses_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer's order may run a node again after its weights were updated; then the plan that is known stays."""
    prepared = prepared_zoo("gpt2", "AdamW")
    program = program_of(prepared.trace, prepared.nodes)
    updated = {s for n in prepared.nodes if n.phase == "update" for s in n.mutates}
    again = next(n for n in prepared.nodes if n.phase == "forward" and not n.once and updated.intersection(n.reads))
    asked = []

    def late(step: StepGraph, answer: object) -> list[tuple[int, int]]:
        asked.append(answer)
        return [*((n.node, 0) for n in prepared.nodes), (again.node, 0)]

    monkeypatch.setattr(way_module, "order_of", late)
    monkeypatch.setattr(type(program), "without_dead", lambda self, executions: list(executions))
    monkeypatch.setattr(type(program), "retain_where_possible", lambda self, executions, budget: executions)
    plan = Variant("plain", prepared.trace, prepared.nodes, prepared.blocks)
    whole = prepared.solve().summary
    way = CutWay(plan, program, [], whole.smallest_feasible_bytes)
    way._budget_bytes = 1 << 50  # all orders fit
    monkeypatch.setattr(way, "_guided", lambda *answer: None)
    list(way.improve(time.monotonic() + 10))
    assert asked
    assert way.found is None
