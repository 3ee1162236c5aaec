"""Plans come back from their store only if the referee finds that they do what they state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stowage.flows import TrainingStep, fit
from stowage.flows.planning import step as _planning
from stowage.stages.ir.errors import NoRoomInLowerTier
from stowage.stages.ir.plan import PlanRow, PlanSummary, Slot
from stowage.stages.ir.table import read_record, read_rows, write_record, write_rows
from tests.api.beside_plain import adamw, square


def model() -> nn.Sequential:
    torch.manual_seed(0)
    parts = [(nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.1)) for _ in range(3)]
    return nn.Sequential(*(part for each in parts for part in each))


def batch(number: int) -> torch.Tensor:
    torch.manual_seed(number)
    return torch.randn(200, 32)


def planned(stores: Path, **more: Any) -> TrainingStep:
    trained = model()
    more = {"device_budget": "75%", "quick": True, "say": lambda text: None} | more
    return fit(trained, batch(0), adamw(trained), loss=square, cache_dir=stores, **more)


def losses(step: TrainingStep) -> list[float]:
    return [float(step(batch(number))) for number in range(3)]


def plainly() -> list[float]:
    trained, found = model(), list[float]()
    optimizer = adamw(trained)
    for number in range(3):
        loss = square(trained(batch(number)), None)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    return found


@pytest.fixture
def solves(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """One for each plan that is searched."""
    found: list[None] = []
    search = _planning.solve_variants

    def counted(*arguments: Any) -> Any:
        found.append(None)
        return search(*arguments)

    monkeypatch.setattr(_planning, "solve_variants", counted)
    return found


Plan = tuple[list[PlanRow], list[Slot], PlanSummary]


def without(kind: str) -> Callable[[Plan], Plan]:
    """A plan without the last row of a kind."""

    def change(plan: Plan) -> Plan:
        rows, slots, summary = plan
        last = max(i for i, row in enumerate(rows) if row.action == kind)
        kept = [replace(row, row=i) for i, row in enumerate(rows[:last] + rows[last + 1 :])]
        return kept, slots, summary

    return change


def summary(**fields: Any) -> Callable[[Plan], Plan]:
    return lambda plan: (plan[0], plan[1], replace(plan[2], **fields))


CHANGES: dict[str, Callable[[Plan], Plan]] = {
    "a computation less": without("compute"),
    "a free less": without("free"),
    "nothing": lambda plan: ([], *plan[1:]),
    "two rows exchanged": lambda plan: ([*plan[0][:4], plan[0][5], plan[0][4], *plan[0][6:]], *plan[1:]),
    "a node that is not there": lambda plan: ([replace(plan[0][0], node=10**6), *plan[0][1:]], *plan[1:]),
    "a node from the end": lambda plan: ([replace(plan[0][0], node=-3), *plan[0][1:]], *plan[1:]),
    "other bytes": lambda plan: ([replace(plan[0][0], peak_bytes=1), *plan[0][1:]], *plan[1:]),
    "a slot": lambda plan: (plan[0], [Slot(0, "x", 1, "parameter", "device", False)], plan[2]),
    "a path": summary(plan_hash="../../../outside"),
    "another name": summary(plan_hash="0" * 16),
    "another program": summary(configuration_hash="x"),
    "another budget": summary(device_budget_bytes=10**9),
    "a lower peak": summary(device_peak_bytes=1),
    "another rewrite": summary(variant="x"),
    "more between steps": summary(baseline_bytes=10**9),
}


def change(stores: Path, how: Callable[[Plan], Plan]) -> None:
    """Every stored plan, with the hashes of what it then is."""
    for folder in (stores / "solved").iterdir():
        plan = (
            read_rows(folder / "plan.parquet", PlanRow),
            read_rows(folder / "slots.parquet", Slot),
            read_record(folder / "summary.json", PlanSummary),
        )
        rows, slots, stated = how(plan)
        write_rows(folder / "plan.parquet", PlanRow, rows)
        write_rows(folder / "slots.parquet", Slot, slots)
        write_record(folder / "summary.json", stated)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    stores = tmp_path_factory.mktemp("stored") / "stores"
    assert losses(planned(stores)) == plainly()
    return stores


@pytest.mark.parametrize("how", CHANGES)
def test_a_changed_plan_is_searched_again(stored: Path, tmp_path: Path, solves: list[None], how: str) -> None:
    import shutil

    stores = tmp_path / "a" / "b" / "stores"
    shutil.copytree(stored, stores)
    change(stores, CHANGES[how])
    assert losses(planned(stores)) == plainly()
    assert len(solves) == 1
    assert not list(tmp_path.rglob("outside*"))
    planned(stores)
    assert len(solves) == 1, "and is whole again"


def test_an_unchanged_one_is_not(stored: Path, solves: list[None]) -> None:
    assert losses(planned(stored)) == plainly()
    assert solves == []


def test_a_full_disk_of_the_lower_tier_speaks_of_the_disk(tmp_path: Path) -> None:
    wide = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(6)))
    given = torch.randn(4, 1024)
    how: dict[str, Any] = {"loss": square, "cache_dir": tmp_path / "stores", "quick": True, "say": lambda text: None}
    how |= {"offload_dir": tmp_path / "lower_tier", "device_budget": "60MiB"}
    with pytest.raises(
        NoRoomInLowerTier, match=r"moving .* to the offload folder's disk, which has room for 1\.0 MiB"
    ) as error:
        fit(wide, given, adamw(wide), disk_budget="1MiB", **how)
    assert "disk_budget" in str(error.value)
    assert "device budget of 60.0 MiB can be met" in str(error.value)
    assert fit(wide, given, adamw(wide), disk_budget="1GiB", **how).plan.lower_tier_bytes > 1 << 20
