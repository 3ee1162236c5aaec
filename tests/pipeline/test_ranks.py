"""The real pipeline with `trace.ranks: 2`: through `dvc`, then through the flow."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from pipeline_projects import TINY, commit, copied_project, run, set_parameters

from stowage.flows.pipeline.project import stage_environment
from stowage.stages.ir.plan import PlanSummary
from stowage.stages.ir.run import StepRecord
from stowage.stages.ir.table import read_record, read_rows

RANKS = {"trace": {"ranks": 2}, "train": {"steps": 3, "measure_every": 1, "checkpoint_every": 1}}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone of this repository with a tiny GPT-2, planned and trained on two ranks through DVC, committed."""
    folder = copied_project(tmp_path_factory.mktemp("ranks") / "project")
    set_parameters(folder, TINY)
    set_parameters(folder, RANKS)
    run([sys.executable, "-m", "stowage.stages.device", "cpu", "--ranks", "2"], folder)
    run(["dvc", "repro"], folder)
    commit(folder, "Planned")
    return folder


@pytest.mark.long
def test_two_ranks_have_the_numbers_of_distributed_data_parallel_within_the_budget(two_ranks: Path) -> None:
    summary = read_record(two_ranks / "artifacts" / "solve" / "summary.json", PlanSummary)
    steps = read_rows(two_ranks / "artifacts" / "train" / "steps.parquet", StepRecord)
    assert len(steps) == 3
    assert [step.loss for step in steps] == [step.eager_loss for step in steps]
    peaks = [step.peak_bytes for step in steps]
    assert 0 < max(peaks) <= summary.device_budget_bytes
    assert max(peaks) <= summary.device_peak_bytes + max(0.02 * summary.device_peak_bytes, 1 << 20)
    text = (two_ranks / "artifacts" / "codegen" / "step.py").read_text()
    assert "run.gather(" in text
    assert "run.scatter(" in text
    assert not list((two_ranks / ".stowage" / "checkpoints").rglob("*.safetensors"))


@pytest.mark.long
@pytest.mark.usefixtures("prefect_home")
def test_the_flow_trains_on_two_ranks(two_ranks: Path) -> None:
    from stowage.flows.train import train

    shutil.rmtree(two_ranks / "artifacts" / "train")
    run(["git", "checkout", "--quiet", "artifacts/train"], two_ranks)
    set_parameters(two_ranks, {"train": {"steps": 2}})
    train(root=two_ranks)
    metrics = json.loads((two_ranks / "artifacts" / "train" / "metrics.json").read_text())
    assert metrics["losses_equal"] is True
    assert json.loads(run(["dvc", "status", "--json"], two_ranks)) == {}


@pytest.mark.long
def test_a_device_without_rates_of_collectives_is_one_sentence(two_ranks: Path) -> None:
    path = two_ranks / "artifacts" / "device.json"
    before = path.read_text()
    content = json.loads(before)
    path.write_text(json.dumps(content | {"collective_ranks": 3}))
    done = subprocess.run(
        [sys.executable, "-m", "stowage.stages.profile"],
        cwd=two_ranks,
        env=stage_environment(two_ranks),
        capture_output=True,
        text=True,
        check=False,
    )
    path.write_text(before)
    assert done.returncode == 1
    assert "(`stowage device cpu --ranks 2`)" in done.stderr
    assert "Traceback" not in done.stderr
