"""Step time against budget: the plans that `fit` makes, budgets that are found among them, and cards not at hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from torch import nn

from stowage.flows import best_batch, curve, fit
from stowage.flows.planning.curve_card import LARGEST
from stowage.flows.planning.curve_result import Curve
from stowage.stages.ir.curve import CurvePoint
from stowage.stages.ir.errors import Infeasible, ParameterError
from stowage.stages.ir.table import read_rows


class Layers(nn.Module):
    """Blocks with a wide middle, so that there is something to recompute."""

    def __init__(self, width: int = 32, layers: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def _loss(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
    return outputs.square().mean()


def _optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def _batch(samples: int = 512) -> torch.Tensor:
    return torch.randn(samples, 32, generator=torch.Generator().manual_seed(0))


COMMON: dict[str, Any] = {"loss": _loss, "quick": True, "say": lambda text: None}


@pytest.fixture(scope="module")
def found(fit_stores: Path) -> Curve:
    return curve(Layers(), _batch(), _optimizer, budgets=8, cache_dir=fit_stores, **COMMON)


def _step(fit_stores: Path, budget: str | int) -> Any:
    model = Layers()
    return fit(model, _batch(), _optimizer(model.parameters()), device_budget=budget, cache_dir=fit_stores, **COMMON)


def test_the_curve_goes_from_everything_kept_to_the_least(found: Curve) -> None:
    points = found.points
    assert len(points) == 8
    assert [p.budget_bytes for p in points] == sorted((p.budget_bytes for p in points), reverse=True)
    assert all(p.feasible and p.peak_bytes <= p.budget_bytes for p in points)
    assert points[0].slowdown == 0.0
    assert points[-1].budget_bytes == found.smallest_bytes
    assert points[-1].slowdown > 0.0
    assert not found.transfers


def test_each_point_is_the_plan_that_fit_makes(found: Curve, fit_stores: Path) -> None:
    for point in (found.points[0], found.points[3], found.points[-1]):
        plan = _step(fit_stores, point.budget_bytes).plan
        assert plan.plan_hash == point.plan_hash
        assert (plan.device_peak_bytes, plan.step_time_s) == (point.peak_bytes, point.step_time_s)


def test_it_is_a_table_a_picture_and_a_file(found: Curve, tmp_path: Path) -> None:
    table, picture = found.write(tmp_path)
    assert tuple(read_rows(table, CurvePoint)) == found.points
    assert pl.read_parquet(table).equals(found.frame())
    assert picture.read_bytes().startswith(b"\x89PNG")
    text = str(found)
    assert len(text.splitlines()) == 4 + len(found.points)
    assert "keep_all" in text
    least = found.least_at(0.05)
    assert least is not None
    assert least.slowdown <= 0.05


def test_budgets_that_are_named_are_planned_even_where_there_is_no_plan(found: Curve, fit_stores: Path) -> None:
    wanted = ["90%", found.smallest_bytes - 1]
    other = curve(Layers(), _batch(), _optimizer, budgets=wanted, cache_dir=fit_stores, **COMMON)
    assert [p.feasible for p in other.points] == [True, False]
    assert other.points[1].smallest_feasible_bytes == found.smallest_bytes
    assert "is the least" in str(other)


@pytest.mark.parametrize("budgets", [1, 0, True, [], "50%", 2000])
def test_wrong_budgets_are_one_sentence(budgets: Any, fit_stores: Path) -> None:
    with pytest.raises(ParameterError, match="budgets is"):
        curve(Layers(), _batch(), _optimizer, budgets=budgets, cache_dir=fit_stores, **COMMON)


def test_fit_takes_the_least_memory(found: Curve, fit_stores: Path) -> None:
    plan = _step(fit_stores, "smallest").plan
    assert plan.device_budget_bytes == found.smallest_bytes
    assert plan.budget_found == "the least memory for which a plan was found"
    assert plan.budget_found in repr(plan)
    with pytest.raises(Infeasible):
        _step(fit_stores, found.smallest_bytes - 1)


@pytest.mark.parametrize("slowdown", [0.05, 0.2])
def test_fit_takes_the_least_memory_at_a_slowdown(slowdown: float, found: Curve, fit_stores: Path) -> None:
    from stowage.stages.solve.goals import NOTCHES

    plan = _step(fit_stores, f"+{slowdown:.0%}").plan
    kept_s = found.keep_all_time_s
    assert plan.step_time_s <= (1 + slowdown) * kept_s
    notch = -(-(found.keep_all_peak_bytes - found.smallest_bytes) // NOTCHES)
    less = plan.device_budget_bytes - notch
    assert less < found.smallest_bytes or _step(fit_stores, less).plan.step_time_s > (1 + slowdown) * kept_s
    assert f"at most {100 * slowdown:g}% longer" in plan.budget_found


def test_fit_takes_what_is_free_and_trains(fit_stores: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from stowage.flows.api import budget
    from stowage.stages.solve.free import Free

    monkeypatch.setattr(budget, "free_ram", lambda: Free(300 << 20, "the cgroup /job"))
    step = _step(fit_stores, "auto")
    held = sum(p.nbytes for p in step.model.parameters())
    assert step.plan.device_budget_bytes == (300 << 20) - (256 << 20) + held
    assert "free on the cgroup /job" in step.plan.budget_found
    assert "less a reserve of 256.0 MiB" in step.plan.budget_found
    assert torch.isfinite(step(_batch()))


def test_best_batch_refuses_what_has_no_meaning_there(fit_stores: Path) -> None:
    for budget in ("smallest", "+5%"):
        with pytest.raises(ParameterError, match="device_budget"):
            best_batch(Layers(), _batch(), _optimizer, device_budget=budget, cache_dir=fit_stores, **COMMON)


def _card(tmp_path: Path, gib: float) -> Path:
    path = tmp_path / "card.json"
    path.write_text(
        f'{{"name": "Small", "memory_gib": {gib}, "bandwidth_gb_s": 100, "fp32_tflops": 1, "half_tflops": 2, '
        '"pcie": "4.0 x8", "sources": ["made up"]}'
    )
    return path


def test_a_card_that_is_large_enough_is_said_to_be(fit_stores: Path) -> None:
    with torch.device("meta"):
        model = Layers()
    found = curve(model, _batch(), _optimizer, budgets=3, device="rtx-4090", cache_dir=fit_stores, **COMMON)
    assert found.answer is not None
    assert found.answer.verdict == "plainly"
    assert str(found).startswith("fits plainly (NVIDIA GeForce RTX 4090, 23.5 GiB of it usable; an estimate)\n")
    assert f"up to {LARGEST}" in str(found)
    assert "source: NVIDIA Ada GPU architecture white paper" in str(found)
    assert found.estimated
    assert all(p.is_meta for p in model.parameters()), "no weights were made"


def test_a_card_that_is_too_small_needs_a_plan_or_more(found: Curve, fit_stores: Path, tmp_path: Path) -> None:
    def on(nbytes: int) -> Curve:
        gib = (nbytes + (512 << 20)) / (1 << 30)
        return curve(
            Layers(), _batch(), _optimizer, budgets=3, device=_card(tmp_path, gib), cache_dir=fit_stores, **COMMON
        )

    verdicts = {}
    least = on(1 << 30).smallest_bytes
    for nbytes in (1 << 30, least + 200_000, least // 2, 1 << 20):
        answer = on(nbytes).answer
        assert answer is not None
        verdicts[nbytes] = answer.verdict
    assert verdicts[1 << 30] == "plainly"
    assert verdicts[least + 200_000] == "planned"
    assert verdicts[1 << 20] == "no"


def test_a_step_writes_its_report(found: Curve, fit_stores: Path, tmp_path: Path) -> None:
    step = _step(fit_stores, found.points[4].budget_bytes)
    losses = [float(step(_batch())) for _ in range(4)]
    step.measure(_batch())
    step.trace(_batch(), tmp_path / "trace.json")
    page = step.report(tmp_path / "r.html", curve=found)
    assert page == tmp_path / "r.html"
    text = page.read_text()
    assert all(f"{loss:.9g}" in text for loss in losses), "every iteration is in it"
    assert "Step time against budget" in text
    assert "layers.0" in text, "modules are named"
    assert "Predicted and measured" in text, "the traced iteration"
    assert "<code>layers." in text
    assert sorted(p.name for p in tmp_path.iterdir()) == ["r.html", "trace.json"], "the page needs no other file"


def test_a_report_before_any_iteration_is_of_the_plan(found: Curve, fit_stores: Path, tmp_path: Path) -> None:
    text = _step(fit_stores, "smallest").report(tmp_path / "r.html").read_text()
    assert "No iteration has run yet" in text
    assert "the least memory for which a plan was found" in text
