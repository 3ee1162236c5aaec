"""The benchmark of O-ILP's exact program."""

from __future__ import annotations

import pytest

from stowage.flows.benchmarks.papers import exact
from stowage.flows.benchmarks.papers.exact import SETTINGS, exact_rows
from stowage.flows.benchmarks.papers.machines import PaperModel
from stowage.flows.planning.effort import QUICK
from tests.benchmarks.test_papers import SHAPE

MIB = 1 << 20


def test_each_program_is_solved_within_the_gap_or_has_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "EFFORT", QUICK)
    said: list[str] = []
    model = PaperModel("RTX 3060", "small", "llama", SHAPE, batch=1)
    roomy, tight, none = exact_rows(said.append, [model], [200 * MIB, 20 * MIB, MIB])
    assert len(said) == 3
    for row in (roomy, tight):
        assert 0 < row.bound_s <= row.step_s
        assert row.gap <= SETTINGS.gap + 1e-6
        assert row.constraints > row.variables > 100
    assert roomy.step_s <= tight.step_s
    assert none.gap == 1.0
    assert none.status == "infeasible"
