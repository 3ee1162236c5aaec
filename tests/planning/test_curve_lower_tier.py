"""Step time against budget where tensors may leave the device: to a folder, or to the RAM behind a described card."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from torch import nn

from stowage.flows import Offload, curve
from stowage.flows.planning.curve_result import Curve
from stowage.flows.planning.job import Planning
from stowage.stages.ir.curve import CurvePoint
from stowage.stages.ir.table import read_rows


class Wide(nn.Module):
    """Layers whose weights and optimizer states take most of the memory."""

    def __init__(self, width: int = 1024, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def _loss(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
    return outputs.square().mean()


def _optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


COMMON: dict[str, Any] = {"loss": _loss, "quick": True, "say": lambda text: None}
BATCH = torch.zeros(64, 1024)
MIB = 1 << 20


def _columns(text: str) -> dict[str, list[str]]:
    """The cells of a curve's table by the heads of their columns, which end where their heads end."""
    lines = text.splitlines()
    at = next(k for k, line in enumerate(lines) if line.lstrip().startswith("budget"))
    rows = lines[at + 1 :]
    rows = rows[: rows.index("")] if "" in rows else rows
    found, start = {}, 0
    for head in ("budget", "peak", "of plain", "step", "slower", "moved", "waits"):
        end = lines[at].index(head) + len(head)
        found[head] = [row[start:end].strip() for row in rows]
        start = end
    return found


def test_plans_from_a_folder_show_what_they_move(fit_stores: Path, tmp_path: Path) -> None:
    offload = Offload(tmp_path / "lower_tier")
    found = curve(
        Wide(),
        BATCH,
        _optimizer,
        budgets=["90MiB", "44MiB"],
        offload=offload,
        costs="roofline",
        cache_dir=fit_stores,
        **COMMON,
    )
    kept, moving = found.points
    assert (kept.method, kept.traffic_bytes) == ("keep_all", 0)
    assert moving.feasible
    assert 0 < moving.peak_bytes <= moving.budget_bytes == 44 * MIB
    # Weights and states take 48 MiB: what does not fit is offloaded and reloaded in each step.
    assert moving.lower_tier_bytes >= 48 * MIB - moving.peak_bytes
    assert min(moving.offload_bytes, moving.reload_bytes) > 0
    assert found.transfers
    assert found.smallest_bytes < 48 * MIB
    assert (kept.planned_within_bytes, moving.planned_within_bytes) == (90 * MIB, 44 * MIB)
    table = _columns(str(found))
    assert table["moved"] == ["0.0 MiB", f"{moving.traffic_bytes / MIB:.1f} MiB"]
    parquet, picture = found.write(tmp_path / "out")
    assert tuple(read_rows(parquet, CurvePoint)) == found.points
    frame = pl.read_parquet(parquet)
    assert (frame["offload_bytes"] + frame["reload_bytes"]).to_list() == [0, moving.traffic_bytes]
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def on_card(fit_stores: Path, tmp_path: Path) -> Callable[..., Curve]:
    def on(usable_mib: int, budgets: int | list[str] = 3, **more: Any) -> Curve:
        card = tmp_path / "card.json"
        rates = {"bandwidth_gb_s": 100, "fp32_tflops": 1, "half_tflops": 2, "pcie": "4.0 x8"}
        card.write_text(json.dumps({"name": "Small", "memory_gib": (usable_mib + 512) / 1024, **rates}))
        with torch.device("meta"):
            model = Wide()
        everything = {**COMMON, "cache_dir": fit_stores, **more}
        return curve(model, BATCH, _optimizer, budgets=budgets, device=card, **everything)

    return on


def test_a_card_that_needs_ram_is_said_to(on_card: Callable[..., Curve]) -> None:
    found = on_card(60, ["60MiB"])
    answer = found.answer
    assert answer is not None
    assert answer.verdict == "with_ram", str(found)
    first = str(found).splitlines()[0]
    assert first == answer.line
    (point,) = found.points
    assert point.budget_bytes == answer.budget_bytes
    assert first.startswith(f"needs {point.lower_tier_bytes / MIB:.1f} MiB of RAM (pinned), and then fits at ")
    assert f"moving {point.traffic_bytes / MIB:.1f} MiB over PCIe each step" in first
    assert point.traffic_bytes > 0


def test_a_row_that_takes_the_plan_of_a_smaller_budget_says_so(
    on_card: Callable[..., Curve], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plans above the least memory are made slow, as those by rules can be: then the answer and the rows take it."""
    from stowage.flows.planning import curve as planning

    alone = on_card(60, ["60MiB"], host_budget="1GiB")
    least, solve = alone.smallest_bytes, planning.solve_costed
    assert least < 59 * MIB, "otherwise there is nothing to borrow"

    def slower_with_more(costed: Any, budget_bytes: int, how: Planning, **more: Any) -> Any:
        solved, options = solve(costed, budget_bytes, how, **more)
        if solved.slots and budget_bytes > least:
            solved = replace(solved, summary=replace(solved.summary, step_time_s=9.0))
        return solved, options

    monkeypatch.setattr(planning, "solve_costed", slower_with_more)
    found = on_card(60, ["62MiB", "60MiB", str(least), "1MiB"], host_budget="1GiB")
    *rows, last, none = found.points
    assert not none.feasible
    assert none.smallest_feasible_bytes == least == found.smallest_bytes
    assert last.step_time_s < 9.0
    for row in rows:
        assert (row.planned_within_bytes, row.plan_hash) == (least, last.plan_hash)
        assert row.step_time_s == last.step_time_s
    assert str(found).count(f"(as within {least / MIB:.1f} MiB)") == 2
    assert found.answer is not None
    assert f"then fits at {100 * last.slowdown:+.1f}%" in found.answer.line


def test_the_least_and_everything_kept_are_compared_as_budgets(on_card: Callable[..., Curve]) -> None:
    """A budget of a card has a reserve: the line must not say that the least takes more than everything."""
    found = on_card(400, 2)
    assert found.smallest_bytes < found.keep_all_bytes == found.points[0].budget_bytes
    reserve = found.keep_all_bytes - found.keep_all_peak_bytes
    assert reserve > 32 * MIB
    line = next(line for line in str(found).splitlines() if line.startswith("a budget leaves some memory"))
    assert f"{found.keep_all_bytes / MIB:.1f} MiB ({reserve / MIB:.1f} MiB of it left)" in line
    assert line.endswith(f"least {found.smallest_bytes / MIB:.1f} MiB")
    for point in found.points:
        assert found.smallest_bytes <= point.smallest_feasible_bytes <= point.budget_bytes


def test_the_curve_has_the_card_of_its_answer(on_card: Callable[..., Curve]) -> None:
    """Otherwise the line of the picture passes the card at another slowdown than the answer says."""
    found = on_card(60, 2)
    assert found.answer is not None
    assert found.answer.verdict == "with_ram"
    top, card, least = found.points
    assert top.budget_bytes > card.budget_bytes > least.budget_bytes == found.smallest_bytes
    assert card.budget_bytes == found.answer.budget_bytes
    assert f"then fits at {100 * card.slowdown:+.1f}%" in found.answer.line


def test_a_limit_of_ram_ends_the_curve(on_card: Callable[..., Curve]) -> None:
    boundless = on_card(60, ["60MiB"])
    room = boundless.points[0].lower_tier_bytes // 4
    found = on_card(60, 2, host_budget=room)
    assert found.answer is not None
    assert found.answer.verdict == "no"
    assert "more than plans may use" in found.answer.line
    assert all(p.lower_tier_bytes <= room for p in found.points)
    assert found.smallest_bytes > boundless.smallest_bytes
