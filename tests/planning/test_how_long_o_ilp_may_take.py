"""Whoever plans quickly gives O-ILP less time; nobody says otherwise, and it has the defaults."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stowage.flows import Offload, best_batch, curve
from stowage.flows.planning.step import QUICK, Effort, Planning, StepToPlan, plan_step
from stowage.stages.formulations.offload.o_ilp.answers import OIlpAnswer
from stowage.stages.formulations.offload.o_ilp.solve import o_ilp
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


def test_without_searches_rules_alone_decide_what_is_offloaded(tmp_path: Path, asked: list[SolverSettings]) -> None:
    plan = planned(tmp_path, replace(QUICK, o_ilp_searches=0))
    assert not asked
    assert plan.slots
    assert plan.summary.device_peak_bytes <= plan.summary.device_budget_bytes


def test_so_many_searches_are_made_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No plan is close enough to O-ILP's here, so that all searches are made that may be."""
    runs: list[int] = []
    run = search._Search.run

    def counted(self: Any) -> Any:
        runs.append(1)
        return run(self)

    monkeypatch.setattr(search._Search, "run", counted)
    monkeypatch.setattr(search, "CLOSE_TO_O_ILP", 0.0)
    planned(tmp_path, QUICK)
    by_default = len(runs)
    runs.clear()
    planned(tmp_path, replace(QUICK, o_ilp_searches=1))
    assert by_default > len(runs) > 0
    assert by_default % len(runs) == 0, "as many for each variant"


def test_the_least_memory_is_found_without_o_ilp(
    fit_stores: Path, tmp_path: Path, asked: list[SolverSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    """O-ILP is asked for the budgets that are shown, and for no other."""
    from stowage.flows.planning import curve as planning

    budgets: list[tuple[int, int]] = []
    solve = planning.solve_costed

    def noted(costed: Any, budget_bytes: int, how: Planning, **more: Any) -> Any:
        budgets.append((how.effort.o_ilp_searches, budget_bytes))
        return solve(costed, budget_bytes, how, **more)

    monkeypatch.setattr(planning, "solve_costed", noted)
    model, batch, loss = ZOO["tied"]()
    optimizer = torch.optim.AdamW(model.parameters())
    more: dict[str, Any] = {"loss": loss, "quick": True, "costs": "roofline", "cache_dir": fit_stores}
    found = curve(model, batch, optimizer, budgets=4, offload=Offload(tmp_path), say=lambda text: None, **more)
    with_o_ilp = {budget for searches, budget in budgets if searches}
    assert len({budget for searches, budget in budgets if not searches}) > 1
    assert with_o_ilp <= {p.budget_bytes for p in found.points}
    assert found.smallest_bytes in with_o_ilp


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
