"""The measured peak of a rank is the predicted one."""

from __future__ import annotations

from pathlib import Path

import pytest

from stowage.stages.ir.errors import MIB
from tests.matrix import some
from tests.sharding.ranks import run_on_ranks

STATES = 5


@pytest.mark.parametrize("name", some(["gpt2", "gpt2_wide"], keep=["gpt2"]))
def test_measured_is_predicted(name: str, fit_stores: Path) -> None:
    results = run_on_ranks("tests.sharding.peaks", str(fit_stores), name)
    assert len(results) == 2 * STATES
    for state in {r["state"] for r in results}:
        found = [r for r in results if r["state"] == state]
        predicted = found[0]["predicted"]
        least = min(r["measured"] for r in found)
        assert abs(least - predicted) <= max(0.02 * predicted, MIB), found
        # A thread of gloo's may free its copies of two groups late, in all steps on a busy machine.
        assert max(r["measured"] for r in found) <= 1.02 * predicted + 2 * found[0]["largest"], found
