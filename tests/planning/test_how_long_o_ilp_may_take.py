"""Whoever plans quickly gives O-ILP less time; nobody says otherwise, and it has the defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from stowage.flows import best_batch
from stowage.flows.planning.step import QUICK, Effort, Planning, StepToPlan, plan_step
from stowage.stages.formulations.offload.o_ilp.solve import OIlpAnswer, o_ilp
from stowage.stages.ir.costs import DeviceDescription
from stowage.stages.solve import batch_size
from stowage.stages.solve.offload.offmate import search
from stowage.stages.solver.outcome import SolverSettings
from tests.offload.with_lower_tier import LOWER_TIER
from tests.zoo import ZOO

TARGET = DeviceDescription("0123456789abcdef", "made up", "cpu", 1 << 34, 1e10, 1e10, 1e9, 1e9, 1e9, 1e10, 1e-6)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[SolverSettings]:
    """The limits that O-ILP got, solve by solve."""
    found: list[SolverSettings] = []

    def noted(problem: Any, settings: SolverSettings, **more: Any) -> OIlpAnswer:
        found.append(settings)
        return o_ilp(problem, settings, **more)

    monkeypatch.setattr(search, "o_ilp", noted)
    monkeypatch.setattr(batch_size, "o_ilp", noted)
    return found


def planned(stores: Path, effort: Effort) -> Any:
    model, batch, loss = ZOO["batchnorm"]()
    step = StepToPlan(model=model, batch=batch, loss=loss, optimizer=torch.optim.AdamW(model.parameters()))
    how = Planning(
        stores=stores, effort=effort, costs="roofline", target=TARGET, method="offmate", lower_tier=LOWER_TIER
    )
    return plan_step(step, "95%", how)


def test_quick_shortens_o_ilp(tmp_path: Path, asked: list[SolverSettings]) -> None:
    planned(tmp_path, QUICK)
    assert set(asked) == {QUICK.o_ilp}
    assert QUICK.o_ilp.time_limit_s < Effort().o_ilp.time_limit_s
    assert QUICK.o_ilp.gap > Effort().o_ilp.gap


def test_by_default_it_has_20_seconds_and_1_percent(tmp_path: Path, asked: list[SolverSettings]) -> None:
    planned(tmp_path, Effort(grid=QUICK.grid, solver=QUICK.solver))
    assert set(asked) == {SolverSettings(20.0, 0.01)}


def test_plans_of_other_limits_are_not_taken(tmp_path: Path, asked: list[SolverSettings]) -> None:
    planned(tmp_path, QUICK)
    first = len(asked)
    planned(tmp_path, QUICK)
    assert len(asked) == first, "it was solved before"
    planned(tmp_path, Effort(grid=QUICK.grid, solver=QUICK.solver))
    assert len(asked) > first


def test_best_batch_is_as_quick(fit_stores: Path, tmp_path: Path, asked: list[SolverSettings]) -> None:
    model, batch, loss = ZOO["tied"]()
    best_batch(
        model,
        batch,
        torch.optim.AdamW(model.parameters()),
        loss=loss,
        device_budget="64MiB",
        offload_dir=tmp_path,
        method="offmate",
        quick=True,
        largest=2,
        costs="roofline",
        cache_dir=fit_stores,
    )
    assert set(asked) == {QUICK.o_ilp}
