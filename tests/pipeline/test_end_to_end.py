"""The real pipeline on a tiny GPT-2: through `dvc`, then through the flows."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from pipeline_projects import run, set_parameters

from stowage.flows.pipeline.project import TRAIN_STAGES, stage_environment
from stowage.stages.ir.plan import PlanSummary
from stowage.stages.ir.run import StepRecord
from stowage.stages.ir.table import read_record, read_rows

STATUS = ["dvc", "status", "--json"]
SMALLER = {"solve": {"device_budget": "90%"}}


def ran(output: str) -> list[str]:
    """Stages whose command `dvc repro` really ran."""
    return [stage for stage in TRAIN_STAGES if f"Running stage '{stage}'" in output]


def test_the_plan_keeps_its_budget_and_the_numbers_of_plain_pytorch(tiny: Path) -> None:
    summary = read_record(tiny / "artifacts" / "solve" / "summary.json", PlanSummary)
    assert summary.device_peak_bytes <= summary.device_budget_bytes
    steps = read_rows(tiny / "artifacts" / "train" / "steps.parquet", StepRecord)
    assert len(steps) == 3
    assert [step.loss for step in steps] == [step.eager_loss for step in steps]
    compile((tiny / "artifacts" / "codegen" / "step.py").read_text(), "step.py", "exec")


def test_a_second_repro_does_nothing(tiny: Path) -> None:
    assert ran(run(["dvc", "repro"], tiny)) == []
    assert json.loads(run(STATUS, tiny)) == {}
    assert run(["git", "status", "--porcelain"], tiny) == ""


def test_a_budget_runs_only_what_follows_from_it_and_comes_back_from_the_cache(tiny: Path) -> None:
    lock = (tiny / "dvc.lock").read_bytes()
    set_parameters(tiny, SMALLER)
    assert ran(run(["dvc", "repro", "codegen"], tiny)) == ["solve", "codegen"]
    run(["git", "checkout", "--quiet", "params.yaml"], tiny)
    assert ran(run(["dvc", "repro"], tiny)) == []
    assert (tiny / "dvc.lock").read_bytes() == lock


def test_how_often_a_call_is_timed_invalidates_nothing(tiny: Path) -> None:
    set_parameters(tiny, {"profile": {"min_samples": 2}, "options": {"workers": 2}})
    assert ran(run(["dvc", "repro"], tiny)) == []
    run(["git", "checkout", "--quiet", "params.yaml"], tiny)


def test_a_broken_parameter_is_one_sentence(tiny: Path) -> None:
    set_parameters(tiny, {"trace": {"batch_sze": 2}})
    environment = stage_environment(tiny)
    for command in (["-m", "stowage.stages.trace"], ["-m", "stowage.flows.plan"]):
        done = subprocess.run(
            [sys.executable, *command], cwd=tiny, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode != 0
        assert "trace.batch_sze is not a known key; rename it to trace.batch_size" in done.stderr
        assert "Traceback" not in done.stderr
    run(["git", "checkout", "--quiet", "params.yaml"], tiny)


@pytest.mark.usefixtures("prefect_home")
def test_a_flow_and_dvc_agree(tiny: Path) -> None:
    from stowage.flows.plan import plan

    result = plan(root=tiny)
    assert result.folder == tiny / "artifacts"
    assert json.loads(run(STATUS, tiny)) == {}
    assert run(["git", "status", "--porcelain"], tiny) == ""


def test_a_plan_of_a_commit_is_compared_with_the_present_one(tiny: Path) -> None:
    set_parameters(tiny, SMALLER)
    output = run([sys.executable, "-m", "stowage.flows.compare", "--before", "HEAD", "--replan"], tiny)
    assert "| predicted peak |" in output
    assert "The trace is unchanged." in output
    run(["git", "checkout", "--quiet", "."], tiny)
    run(["dvc", "checkout", "--force", "--quiet"], tiny)


def test_checkpoints_are_no_output_of_a_stage(tiny: Path) -> None:
    """DVC deletes a stage's outputs before it runs, and checks none of its own stores."""
    stages = yaml.safe_load((tiny / "dvc.yaml").read_text())["stages"].values()
    outputs = [tiny / (out if isinstance(out, str) else next(iter(out))) for s in stages for out in s.get("outs", ())]
    folder = tiny / ".stowage" / "checkpoints"
    assert outputs
    assert not [out for out in outputs if folder.is_relative_to(out) or out.is_relative_to(folder)]


@pytest.mark.long
def test_a_killed_run_goes_on_from_its_checkpoint(tiny: Path) -> None:
    """What `test_killed_processes` shows of the stage alone."""
    set_parameters(tiny, {"train": {"steps": 30, "checkpoint_every": 2, "measure_every": 0}})
    environment = stage_environment(tiny)
    process = subprocess.Popen(["dvc", "repro", "train"], cwd=tiny, env=environment, start_new_session=True)
    checkpoints = tiny / ".stowage" / "checkpoints"
    deadline = time.monotonic() + 600
    while not list(checkpoints.rglob("*.safetensors")) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert list(checkpoints.rglob("*.safetensors")), "killed after its first checkpoint and before its end"
    run(["dvc", "repro", "train"], tiny)
    steps = read_rows(tiny / "artifacts" / "train" / "steps.parquet", StepRecord)
    assert [step.iteration for step in steps] == list(range(30))
    assert [step.loss for step in steps] == [step.eager_loss for step in steps]
    run(["git", "checkout", "--quiet", "."], tiny)
    run(["dvc", "checkout", "--force", "--quiet"], tiny)


def test_a_clone_with_the_cache_needs_no_run(tiny: Path, tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    run(["git", "clone", "--quiet", str(tiny), str(clone)], tmp_path)
    run(["dvc", "cache", "dir", "--local", str(tiny / ".dvc" / "cache")], clone)
    assert ran(run(["dvc", "repro"], clone)) == []
    assert run(["git", "status", "--porcelain"], clone) == ""
