"""What was planned and stored with leave is no answer to one who gives none."""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stowage.flows import Lossy, TrainingStep, fit
from stowage.stages.ir.plan import Option
from stowage.stages.rewrite import is_asked
from stowage.stages.rewrite.lossy import CODECS, described
from stowage.stages.rewrite.lossy import saved as saved_module
from stowage.stages.solve import PlanRequest, Solved, Variant, solve_variants
from tests.zoo import ZOO


def first_lossy(variants: Sequence[Variant], options: Sequence[Option], request: PlanRequest, *known: object) -> Solved:
    """Plan with leave in codes, whether that is the fastest or not, and without as ever."""
    if not request.lossy:
        return solve_variants(variants, options, request)
    chosen = next(v for v in variants if is_asked(v.name))
    solved = solve_variants([chosen], options, replace(request, max_gradient_error=math.inf, rewrite=""))
    lossy, error = described(variants[0].trace, chosen.name, request.errors)
    return replace(solved, summary=replace(solved.summary, lossy=lossy, gradient_error=error))


def planned(stores: Path, **more: Any) -> TrainingStep:
    model, batch, _ = ZOO["gpt2"]()
    return fit(
        model,
        batch,
        torch.optim.SGD(model.parameters(), lr=1e-2),
        device_budget="97%",
        cache_dir=stores,
        quick=True,
        say=lambda text: None,
        **more,
    )


def test_a_plan_in_codes_is_stored_and_not_found_without_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_module, "SMALLEST", 64)
    with monkeypatch.context() as patch:
        patch.setattr("stowage.flows.planning.step.solve_variants", first_lossy)
        lossy = planned(tmp_path, lossy=Lossy("bf16", 0.1))
    assert not lossy.plan.exact
    assert lossy.plan.lossy
    assert "_bf16_codes" in lossy.planned.source
    again = planned(tmp_path, lossy=Lossy("bf16", 0.1))
    assert again.plan.plan_hash == lossy.plan.plan_hash, "with the same leave the stored plan is taken"
    without = planned(tmp_path)
    assert without.plan.exact
    assert without.plan.lossy == ()
    assert without.plan.gradient_error == 0.0
    assert not any(f"_{kind}_codes" in without.planned.source for kind in CODECS)
    shutil.rmtree(tmp_path / "solved")
    fresh = planned(tmp_path)
    assert without.plan.variant == fresh.plan.variant
    assert [row.action for row in without.planned.rows] == [row.action for row in fresh.planned.rows]
