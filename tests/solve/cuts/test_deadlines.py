"""Wherever time ends, what cuts have found by then fits, and what they have proven is a bound."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from stowage.stages.formulations.cuts.solve import CutAnswer
from stowage.stages.solve.cuts import way as way_module
from stowage.stages.solve.cuts.way import CutWay
from stowage.stages.solve.program.of_trace import program_of
from stowage.stages.solve.variants import Variant
from tests.solve.prepared import prepared_zoo

TICK_S = 10.0
"""What the clock goes on by each time that it is looked at: much more than a solve takes."""


@pytest.mark.parametrize("name", ["unet", "resnet"])
def test_after_any_number_of_looks_at_the_clock(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock stands still but where `CutWay` looks at it, so that the deadline comes between the same two solves."""
    prepared = prepared_zoo(name)
    plan = prepared.smallest()
    budget, program = plan.summary.smallest_feasible_bytes, program_of(prepared.trace, prepared.nodes)
    variant = Variant("plain", prepared.trace, prepared.nodes, prepared.blocks)
    whole = CutWay(variant, program, plan.rows, budget)
    list(whole.improve(time.monotonic() + 60))
    assert whole.found is not None
    least_s = min(whole.fastest_s, plan.summary.step_time_s)
    ended, found = 0, 0
    for looks in (1, 2, 3, 5, 8, 12, 16, 20, 24, 28, 32, 40):
        now = time.monotonic()
        deadline_s = now + looks * TICK_S

        def ticking() -> float:
            nonlocal now
            now += TICK_S
            return now

        monkeypatch.setattr(way_module, "time", SimpleNamespace(monotonic=ticking))
        way = CutWay(variant, program, plan.rows, budget)
        refused = list[Sequence[int]]()
        solve = way._solve

        def noted(
            cuts: Sequence[int], deadline_s: float, gap: float = 1e-4, *, integral: bool = True
        ) -> CutAnswer | None:
            answer = solve(cuts, deadline_s, gap, integral=integral)
            if answer is None:
                refused.append(cuts)
            return answer

        monkeypatch.setattr(way, "_solve", noted)
        bounds = [way.bound_s for _ in way.improve(deadline_s)]
        monkeypatch.undo()
        assert bounds == sorted(bounds)
        assert way.bound_s <= least_s * (1 + 1e-12)
        assert way.fastest_s <= plan.summary.step_time_s
        ended += bool(refused)
        if way.found is None:
            assert way.fastest_s == pytest.approx(plan.summary.step_time_s)
            continue
        judged = way.found.judged(budget)
        assert judged.peak_bytes <= budget
        assert judged.time_s == pytest.approx(way.fastest_s)
        found += bool(refused)
    assert ended > 2, "time never ended before the work did"
    assert found, "no schedule had been found where time ended"
