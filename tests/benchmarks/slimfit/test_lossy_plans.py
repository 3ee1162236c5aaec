"""Plans without leave, with it, and with freezing too: measured beside each other, and none predicted to be slower."""

from __future__ import annotations

from pathlib import Path

import pytest

from stowage.flows.benchmarks.slimfit import lossy_plans
from stowage.flows.benchmarks.slimfit.lossy_plans import EXACT, FROZEN, LOSSY, Case, compare_lossy
from stowage.stages.ir.lossy import Lossy
from stowage.stages.rewrite.lossy import saved as saved_module
from stowage.stages.workload.models import build_model

CLOSE_BYTES = 1 << 20


def small() -> Case:
    shape = {"n_layer": 3, "n_embd": 64, "n_head": 2, "n_positions": 32, "vocab_size": 64}
    model = build_model("gpt2", shape, seed=0)
    return Case(model, *lossy_plans._batches(model, 32))


@pytest.mark.long
def test_no_plan_is_predicted_to_be_slower_than_the_exact_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(lossy_plans.CASES, "small", small)
    monkeypatch.setattr(saved_module, "SMALLEST", 256)
    leave = Lossy(["int8", "int4_group"], 0.05)
    found = list(compare_lossy("small", leave, tmp_path, shares=(0.9, 0.4), iterations=3))
    assert [(row.share, row.plan) for row in found] == [(s, p) for s in (0.9, 0.4) for p in (EXACT, LOSSY, FROZEN)]
    assert any(row.feasible for row in found)
    for exact, lossy, frozen in zip(found[::3], found[1::3], found[2::3], strict=True):
        for row in (exact, lossy, frozen):
            if row.feasible:
                assert row.time_s > 0
                assert row.predicted_peak_bytes <= row.budget_bytes
                assert abs(row.predicted_peak_bytes - row.peak_bytes) <= CLOSE_BYTES
                assert row.error <= row.predicted_error <= 0.05
        if exact.feasible:
            assert not exact.kept
            assert lossy.predicted_time_s <= exact.predicted_time_s
            assert frozen.predicted_time_s < exact.predicted_time_s
            assert lossy.same == (not lossy.kept)
            if lossy.same:
                assert lossy.time_s == exact.time_s
                assert lossy.predicted_time_s == exact.predicted_time_s
        assert not frozen.same
