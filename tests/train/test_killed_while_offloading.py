"""The pipeline's stages for a model that trains from disk: killed with SIGKILL, it ends with the same bits."""

from __future__ import annotations

import copy
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file

from stowage.stages.ir.plan import PlanSummary, Slot
from stowage.stages.ir.run import StepRecord
from stowage.stages.ir.table import read_record, read_rows
from tests.devices import write_device
from tests.runtime.test_traced_iterations import check_chrome_trace
from tests.train.test_killed_processes import PARAMETERS, PLANNING, RUN, losses, run

BUDGET = "60%"


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project whose training state does not fit its budget: planned, not yet trained."""
    folder = tmp_path_factory.mktemp("away")
    parameters = copy.deepcopy(PARAMETERS)
    parameters["trace"]["model"]["overrides"].update(n_layer=4, n_embd=384)  # type: ignore[index]
    parameters["solve"] |= {"device_budget": BUDGET, "offload_dir": ".stowage/lower_tier", "disk_budget": "1GiB"}
    parameters["train"] |= {"steps": 4, "checkpoint_every": 1, "compare_eager": True, "measure_every": 3}
    (folder / "params.yaml").write_text(yaml.safe_dump(parameters))
    write_device(folder)
    done = run(folder, *PLANNING)
    assert done.returncode == 0, done.stderr
    assert "are offloaded" in done.stdout
    return folder


def set_parameters(folder: Path, section: str, **changes: object) -> None:
    path = folder / "params.yaml"
    content = yaml.safe_load(path.read_text())
    content[section] |= changes
    path.write_text(yaml.safe_dump(content))


def test_the_plan_has_slots_and_states_what_it_moves(planned: Path) -> None:
    summary = read_record(planned / "artifacts" / "solve" / "summary.json", PlanSummary)
    slots = read_rows(planned / "artifacts" / "solve" / "slots.parquet", Slot)
    assert {s.role for s in slots} >= {"parameter", "state"}
    assert summary.lower_tier_bytes == sum(s.nbytes for s in slots) > 0
    assert summary.device_peak_bytes <= summary.device_budget_bytes < summary.keep_all_peak_bytes
    assert "run.reload(" in (planned / "artifacts" / "codegen" / "step.py").read_text()


@pytest.mark.long
def test_training_from_disk_that_was_killed_ends_like_training_that_was_not(planned: Path, tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    shutil.copytree(planned, whole)
    shutil.copytree(planned, killed)
    done = run(whole, "train")
    assert done.returncode == 0, done.stderr
    records = read_rows(whole / "artifacts" / "train" / "steps.parquet", StepRecord)
    assert [r.loss for r in records] == [r.eager_loss for r in records]
    metrics = json.loads((whole / "artifacts" / "train" / "metrics.json").read_text())
    assert metrics["measured_peak_bytes"] <= metrics["device_budget_bytes"]

    set_parameters(killed, "train", compare_eager=False)
    assert "Predicted and measured" in (whole / "artifacts" / "train" / "report.html").read_text()
    check_chrome_trace((whole / "artifacts" / "train" / "trace.json").read_text())

    process = subprocess.Popen([sys.executable, "-c", RUN, "train"], cwd=killed, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 600
    while not list(killed.rglob("checkpoints/**/[!.]*.safetensors")):
        assert time.monotonic() < deadline
        assert process.poll() is None, "it ended before it could be killed: train longer"
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not (killed / "artifacts" / "train" / "final.safetensors").exists()

    done = run(killed, "train")
    assert done.returncode == 0, done.stderr
    assert losses(killed) == losses(whole)
    final = "artifacts/train/final.safetensors"
    assert (killed / final).read_bytes() == (whole / final).read_bytes()
    assert all(bool(t.isfinite().all()) for t in load_file(whole / final).values() if t.is_floating_point())
    assert list((whole / ".stowage" / "lower_tier").iterdir()) == [], "the tier's file vanishes with its process"


def test_a_plan_that_offloads_needs_its_folder(planned: Path, tmp_path: Path) -> None:
    folder = tmp_path / "project"
    shutil.copytree(planned, folder)
    set_parameters(folder, "solve", offload_dir=None, disk_budget=None)
    set_parameters(folder, "train", compare_eager=False)
    done = run(folder, "train")
    assert done.returncode == 1
    assert done.stderr.startswith("error: The plan offloads to disk, and offload_dir is empty")
