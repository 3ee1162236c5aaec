"""What a plan for a card leaves to its allocator, and how the allocator is set and read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stowage.flows.planning.step import QUICK, Planning, plan_costed
from stowage.stages.device import allocator
from stowage.stages.device.peaks import Peaks, peaks_of
from stowage.stages.ir.costs import FRAGMENTS, ROUNDING_BYTES
from stowage.stages.ir.errors import Infeasible
from tests.cards.attention import CARD, estimated, gpt2_on_a_card

MIB = 1 << 20
MEASURED = replace(CARD, library_bytes=32 * MIB)


def test_a_cpu_has_none() -> None:
    """Every byte is counted there; nor where nothing is known of a card."""
    assert replace(MEASURED, type="cpu").reserve_bytes(1 << 30, 100) == 0
    assert CARD.reserve_bytes(1 << 30, 100) == 0


def test_what_it_is_made_of() -> None:
    assert MEASURED.reserve_bytes(1000 * MIB, 100) == 32 * MIB + 100 * ROUNDING_BYTES + int(FRAGMENTS * 1000 * MIB)


def test_plans_leave_it_and_say_so(tmp_path: Path) -> None:
    trace = gpt2_on_a_card("efficient")
    costed = estimated(trace, tmp_path, MEASURED)

    def plan(budget: int) -> Any:
        return plan_costed(costed, budget, Planning(stores=tmp_path, effort=QUICK)).summary

    budget = 64 * MIB
    summary = plan(budget)
    assert summary.device_budget_bytes + summary.reserve_bytes == budget
    assert summary.reserve_bytes == MEASURED.reserve_bytes(budget, len(trace.storages))
    assert "beside a reserve of 33.4" in repr(summary)
    with pytest.raises(Infeasible) as caught:
        plan(32 * MIB)
    assert caught.value.budget_bytes == 32 * MIB
    smallest = caught.value.smallest_feasible_bytes
    found = plan(smallest)
    assert found.device_peak_bytes + found.reserve_bytes <= smallest
    with pytest.raises(Infeasible):
        plan(smallest - MIB // 8)


class Allocator:
    """What PyTorch's functions would have been told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, backend: str = "native") -> None:
        self.settings: list[str] = []
        self.emptied = 0
        for name in allocator.VARIABLES:
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: backend)
        monkeypatch.setattr(torch.cuda.memory, "_set_allocator_settings", self.settings.append)
        monkeypatch.setattr(torch.cuda, "empty_cache", self._empty)

    def _empty(self) -> None:
        self.emptied += 1


def test_segments_expand_while_plans_run(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Allocator(monkeypatch)
    assert allocator.prepare_allocator(torch.device("cuda"))
    assert (told.settings, told.emptied) == (["expandable_segments:True"], 1)


@pytest.mark.parametrize("variable", allocator.VARIABLES)
def test_unless_somebody_has_set_the_allocator(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told = Allocator(monkeypatch)
    monkeypatch.setenv(variable, "max_split_size_mb:64")
    assert not allocator.prepare_allocator(torch.device("cuda"))
    assert told.settings == []


def test_or_there_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Allocator(monkeypatch, "cudaMallocAsync")
    assert not allocator.prepare_allocator(torch.device("cuda"))
    assert not allocator.prepare_allocator(torch.device("cpu"))
    assert told.settings == []


def test_peaks_are_told_apart() -> None:
    statistics = {
        "requested_bytes.all.peak": 90,
        "allocated_bytes.all.peak": 100,
        "reserved_bytes.all.peak": 128,
        "num_alloc_retries": 5,
        "num_ooms": 2,
    }
    found = peaks_of(statistics, {"num_alloc_retries": 3, "num_ooms": 2})
    assert (found.requested_bytes, found.allocated_bytes, found.reserved_bytes) == (90, 100, 128)
    assert (found.retries, found.out_of_memory) == (2, 0)
    assert Peaks(torch.device("cpu")).now() is None
