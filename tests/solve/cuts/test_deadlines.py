"""Wherever time ends, what cuts have found by then fits, and what they have proven is a bound."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from stowage.stages.formulations.cuts.solve import CutAnswer
from stowage.stages.solve.cuts import way as way_module
from stowage.stages.solve.cuts.way import GAP, CutWay
from stowage.stages.solve.program.of_trace import program_of
from stowage.stages.solve.variants import Variant
from tests.matrix import some
from tests.solve.prepared import prepared_zoo

TICK_S = 10.0
"""What the clock goes on by each time that it is looked at: much more than a solve takes."""


class Ticking:
    """A clock that stands still but where it is looked at, so that a deadline comes between the same two solves."""

    def __init__(self) -> None:
        self.now_s = time.monotonic()

    def monotonic(self) -> float:
        """The time, later by a tick at each look."""
        self.now_s += TICK_S
        return self.now_s


class Noting(CutWay):
    """Notes whether there was no time left for a solve."""

    ended = False

    def _solve(
        self, cuts: Sequence[int], deadline_s: float, gap: float = GAP, *, integral: bool = True
    ) -> CutAnswer | None:
        answer = super()._solve(cuts, deadline_s, gap, integral=integral)
        self.ended |= answer is None
        return answer


@pytest.mark.parametrize("name", some(["unet", "resnet"], keep=["unet"]))
def test_after_any_number_of_looks_at_the_clock(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound is below the fastest schedule that is ever found, and what is found is as the referee says."""
    prepared = prepared_zoo(name)
    plan = prepared.smallest()
    budget, program = plan.summary.smallest_feasible_bytes, program_of(prepared.trace, prepared.nodes)
    variant = Variant("plain", prepared.trace, prepared.nodes, prepared.blocks)
    whole = CutWay(variant, program, plan.rows, budget)
    list(whole.improve(time.monotonic() + 60))
    least_s = min(whole.fastest_s, plan.summary.step_time_s)
    ended, found = 0, 0
    for looks in (1, 2, 3, 5, 8, 12, 16, 20, 24, 28, 32, 40):
        clock, way = Ticking(), Noting(variant, program, plan.rows, budget)
        with monkeypatch.context() as patch:
            patch.setattr(way_module, "time", clock)
            bounds = [way.bound_s for _ in way.improve(clock.now_s + looks * TICK_S)]
        assert bounds == sorted(bounds)
        assert way.bound_s <= least_s * (1 + 1e-12)
        assert way.fastest_s <= plan.summary.step_time_s
        ended += way.ended
        if way.found is None:
            assert way.fastest_s == pytest.approx(plan.summary.step_time_s)
            continue
        judged = way.found.judged(budget)
        assert judged.peak_bytes <= budget
        assert judged.time_s == pytest.approx(way.fastest_s)
        found += way.ended
    assert ended > 2, "time never ended before the work did"
    assert found, "no schedule had been found where time ended"
