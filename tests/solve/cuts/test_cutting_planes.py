"""Cutting planes: cuts are added where a schedule exceeds the budget, until one fits that is near the bound."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest

from stowage.stages.formulations.cuts.schedule import order_of
from stowage.stages.formulations.cuts.solve import CutAnswer
from stowage.stages.solve.cuts.way import CutWay
from stowage.stages.solve.program.chain import Execution
from stowage.stages.solve.program.of_trace import program_of
from stowage.stages.solve.variants import Variant
from tests.solve.prepared import prepared_zoo

PLENTY_S = 60.0


@pytest.mark.parametrize(("name", "near"), [("unet", 1.02), ("resnet", 1.01)])
def test_cuts_grow_and_what_is_found_fits_and_is_near_the_bound(
    name: str, near: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the smallest budget, where memory is full at several nodes: each answer that exceeds the budget adds cuts."""
    prepared = prepared_zoo(name)
    plan = prepared.smallest()
    budget, program = plan.summary.smallest_feasible_bytes, program_of(prepared.trace, prepared.nodes)
    way = CutWay(Variant("plain", prepared.trace, prepared.nodes, prepared.blocks), program, plan.rows, budget)
    solve, answers = way._solve, list[CutAnswer]()

    def noted(cuts: list[int], deadline_s: float, gap: float = 1e-4, *, integral: bool = True) -> CutAnswer | None:
        answer = solve(cuts, deadline_s, gap, integral=integral)
        if answer is not None and integral:
            answers.append(answer)
        return answer

    monkeypatch.setattr(way, "_solve", noted)
    bounds = [way.bound_s for _ in way.improve(time.monotonic() + PLENTY_S)]
    assert bounds == sorted(bounds)
    cuts = [set(answer.cuts) for answer in answers]
    assert len(cuts[0]) == 1
    assert len(cuts[-1]) > 1
    assert all(a <= b for a, b in pairwise(cuts))
    for answer, after in pairwise(answers):
        executions = [Execution(n, f"{i}") for n, i in order_of(way.step, answer)]
        exceeds = program.peak_bytes(program.without_dead(executions)) > budget
        assert exceeds or after.cuts == answer.cuts, "cuts are added only where the schedule exceeds the budget"
    assert way.found is not None
    judged = way.found.judged(budget)
    assert judged.peak_bytes <= budget
    assert judged.time_s == pytest.approx(way.fastest_s)
    assert way.bound_s <= way.fastest_s < plan.summary.step_time_s
    assert way.fastest_s <= near * way.bound_s
