"""What is said while something is planned, and what an interruption leaves."""

from __future__ import annotations

import logging
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

import stowage.stages.profile.timing as timing
from stowage.stages.ir.costs import Cost
from stowage.stages.ir.table import read_rows
from tests.api.test_lengths import Beside, Tagger


def test_a_logging_line_a_stage_and_one_line_at_the_end(fit_stores: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "stowage"):
        beside = Beside(Tagger, fit_stores, 10, device_budget="81%")
    stages = [r.getMessage() for r in caplog.records if r.name == "stowage"]
    for stage in ("tracing the step", "measuring operations", "cutting the step into blocks", "writing the step"):
        assert sum(stage in s for s in stages) == 1, stages
    (line,) = beside.said
    assert line.startswith("Planned in")
    assert "predicted: peak" in line
    assert "a step" in line
    assert "a new shape that fits will take about" in line


def test_a_model_in_evaluation_mode_is_said(fit_stores: Path) -> None:
    class Still(Tagger):
        def __init__(self) -> None:
            super().__init__()
            self.eval()

    beside = Beside(Still, fit_stores, 10)
    assert "model.training is False" in beside.said[0]
    beside.train(10)


def test_what_was_measured_is_kept_when_planning_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "KEPT_EVERY_S", 0.0)
    looked: list[int] = []
    original = timing._Runs.of_call

    def interrupted(self: Any, call: Any) -> Any:
        looked.append(1)
        if len(looked) > 3:
            raise KeyboardInterrupt
        return original(self, call)

    monkeypatch.setattr(timing._Runs, "of_call", interrupted)
    state = torch.get_rng_state()
    with pytest.raises(KeyboardInterrupt, match="measuring operations"):
        Beside(Tagger, tmp_path, 10)
    assert torch.equal(torch.get_rng_state(), state)
    store = next(path for path in (tmp_path / "costs").glob("*.parquet") if ".returned." not in path.name)
    kept = {c.signature: c for c in read_rows(store, Cost)}
    assert kept
    assert all(c.source == "measured" and c.samples >= 2 for c in kept.values())
    monkeypatch.undo()
    beside = Beside(Tagger, tmp_path, 10)
    after = {c.signature: c for c in read_rows(store, Cost)}
    assert {s: after[s] for s in kept} == kept, "the next run goes on"
    beside.train(10, 9)


def test_quick_warms_the_full_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations with few samples are measured again, others are not; and quick takes what full has measured."""
    measured: list[int] = []
    original = timing.measure_together

    def counted(work: Any, *arguments: Any) -> Any:
        measured.append(sum(len(calls) for _, calls in work))
        return original(work, *arguments)

    monkeypatch.setattr("stowage.stages.profile.variants.measure_together", counted)
    Beside(Tagger, tmp_path, 10, device_budget="200%")
    store = next(path for path in (tmp_path / "costs").glob("*.parquet") if ".returned." not in path.name)
    few = sum(c.samples < 6 for c in read_rows(store, Cost))
    everything = len(read_rows(store, Cost))
    Beside(Tagger, tmp_path, 10, device_budget="200%", quick=False)
    assert measured[1:] == ([few] if few else [])
    assert few < everything
    Beside(Tagger, tmp_path, 10, device_budget="200%")
    assert len(measured) == 1 + bool(few)


SCRIPT = """
import os, signal, sys, threading, time
import torch
from torch import nn
import stowage.stages.profile.timing as timing
from stowage.flows import fit

original = timing._Runs.alone
def alone(self, call):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.01)
    return original(self, call)
timing._Runs.alone = alone
model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
fit(model, (torch.randn(3, 4),), device_budget="100%", loss=lambda o, b: o.sum(), cache_dir=sys.argv[1], quick=True)
"""


def test_ctrl_c_ends_in_one_line(fit_stores: Path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), str(fit_stores)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 130
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("Stopped while planning (measuring operations")


def test_a_live_line_on_a_terminal(fit_stores: Path) -> None:
    """A pseudo terminal sees the stages; nothing of them stays."""
    pty = pytest.importorskip("pty")
    import os

    code = SCRIPT.replace("timing._Runs.alone = alone\n", "")
    master, slave = pty.openpty()
    process = subprocess.Popen([sys.executable, "-c", code, str(fit_stores)], stderr=slave, stdout=slave)
    os.close(slave)
    found = b""
    while True:
        try:
            part = os.read(master, 4096)
        except OSError:
            break
        if not part:
            break
        found += part
    assert process.wait() == 0
    assert b"stowage:" in found
    assert "Planned in" in found.decode().splitlines()[-1]
