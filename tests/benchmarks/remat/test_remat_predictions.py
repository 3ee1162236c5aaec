"""A plan that takes another time than predicted is measured in more processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from stowage.flows.benchmarks.remat.points import PROCESSES, RematJob, run_remat
from stowage.flows.benchmarks.remat.rows import RematRow, unlike_predicted
from stowage.stages.ir.errors import StowageError
from stowage.stages.ir.table import read_rows
from tests.benchmarks.remat.test_remat import ROOT, Scripted

JOB = RematJob(models=("unet",), methods=("auto", "rockmate"), shares=(0.5,), peers=(), rounds=1, timed_s=0.0)


class Placed(Scripted):
    """Processes of one plan differ in speed; 1 s is predicted, which all others take."""

    times_s: ClassVar[Iterator[float]]
    begun: ClassVar[list[str]] = []

    def __init__(self, name: str, *request: Any, **limits: Any) -> None:
        super().__init__(name, *request, **limits)
        self.time_s = 1.0
        if name == "auto 50%":
            self.time_s = next(self.times_s)
            if not self.time_s:
                raise StowageError("auto 50%: the process ended")


def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *times_s: float) -> tuple[list[RematRow], str]:
    """Rows and table."""
    monkeypatch.setattr(Placed, "times_s", iter(times_s), raising=False)
    monkeypatch.setattr(Placed, "begun", [])
    monkeypatch.setattr("stowage.flows.benchmarks.remat.points.Served", Placed)
    table = run_remat(JOB, tmp_path, lambda text: None, tmp_path, ROOT)
    return read_rows(tmp_path / "remat.parquet", RematRow), table


def test_the_median_of_three_processes_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, table = measured(tmp_path, monkeypatch, 1.5, 1.04, 1.06)
    found = {(r.contestant, r.setting): r for r in rows}
    assert len(found) == len(rows) == 4
    for contestant in ("auto", "rockmate"):  # which found the same plan
        assert found[contestant, "50%"].overhead == pytest.approx(0.06)
        assert found[contestant, "50%"].processes == PROCESSES
        assert found[contestant, "smallest"].processes == 1
    assert Placed.begun.count("auto 50%") == PROCESSES
    assert Placed.begun.count("plain PyTorch") == PROCESSES, "each beside one of its own"
    assert "2 of 2 plans took" in table
    assert "median +3.0%), 1 of them by the median of several processes; " in table


def test_what_stays_unlike_its_prediction_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, table = measured(tmp_path, monkeypatch, 0.8, 0.85, 1.0)
    assert [[r.overhead for r in same] for same in unlike_predicted(rows)] == [[pytest.approx(-0.15)] * 2]
    assert "1 of 2 plans took" in table
    assert "(from -15.0% to +0.0%, median -7.5%), 1 of them by" in table


def test_a_process_that_fails_leaves_the_first_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, _ = measured(tmp_path, monkeypatch, 1.5, 0.0)
    assert [r.overhead for r in rows if r.setting == "50%"] == [pytest.approx(0.5)] * 2
    assert all(r.processes == 1 for r in rows)
