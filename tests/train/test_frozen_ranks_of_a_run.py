"""`trace.ranks: 2` with `solve.freeze`, and with `lossy`, through all stages: numbers, a killed rank, peaks, leave."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from stowage.stages.ir.costs import STAND_IN_BYTES
from stowage.stages.ir.plan import PlanSummary
from stowage.stages.ir.run import StepRecord
from stowage.stages.ir.table import read_record, read_rows
from tests.devices import COMPUTING_COSTS_MOST, write_device
from tests.train.test_killed_processes import PARAMETERS, PLANNING, check_that_a_kill_changes_nothing, run


def planned(folder: Path, **sections: Mapping[str, Any]) -> Path:
    """Return a project of two ranks, planned and not trained."""
    parameters: dict[str, Any] = copy.deepcopy(PARAMETERS)
    parameters["trace"]["model"]["overrides"] |= {"n_embd": 32, "n_positions": 32}
    parameters["trace"] |= {"batch_size": 4, "sequence_length": 32, "ranks": 2}
    parameters["options"] |= {"peak_budgets": 2, "save_budgets": 2, "time_limit_s": 0.1, "max_exact_nodes": 200}
    parameters["solve"] |= {"curve_points": 0, "time_limit_s": 1.0}
    parameters["train"] |= {"steps": 12, "compare_eager": True}
    for name, keys in sections.items():
        parameters[name] = {**parameters.get(name, {}), **keys}
    folder.mkdir()
    (folder / "params.yaml").write_text(yaml.safe_dump(parameters))
    collectives = {"collective_bytes_per_s": 1e9, "collective_s": 1e-5, "collective_ranks": 2}
    write_device(folder, **COMPUTING_COSTS_MOST, **collectives)
    done = run(folder, *PLANNING)
    assert done.returncode == 0, done.stderr
    return folder


def check_numbers(planned: Path, folder: Path) -> None:
    """A rank that is killed changes nothing, and no rank takes more than the budget."""
    said = check_that_a_kill_changes_nothing(planned, folder, rank=1)
    assert "error: Rank 1 was ended by SIGKILL: run it again, and it goes on from its last checkpoint." in said
    summary = read_record(planned / "artifacts/solve/summary.json", PlanSummary)
    steps = read_rows(folder / "killed/artifacts/train/steps.parquet", StepRecord)
    assert len(steps) == 12
    budget_bytes = summary.device_budget_bytes + summary.reserve_bytes
    assert summary.reserve_bytes == STAND_IN_BYTES  # of what stands for whole parameters between steps
    assert 0 < max(step.peak_bytes for step in steps[1:]) <= budget_bytes


@pytest.mark.long
def test_ranks_that_freeze_have_the_losses_of_ddp_and_go_on(tmp_path: Path) -> None:
    """Plain PyTorch trains beside it with the same masks: the stage fails if a loss differs in one bit."""
    project = planned(tmp_path / "project", solve={"device_budget": "70%", "freeze": {"rate": 0.75, "policy": "ils"}})
    check_numbers(project, tmp_path)
    steps = read_rows(tmp_path / "killed/artifacts/train/steps.parquet", StepRecord)
    assert [step.loss for step in steps] == [step.eager_loss for step in steps]


@pytest.mark.long
def test_ranks_with_codes_go_on_and_need_leave(tmp_path: Path) -> None:
    leave = {"kinds": ["bf16", "int8_tensor"], "max_gradient_error": 0.05, "batches": 2}
    project = planned(tmp_path / "project", solve={"device_budget": "smallest", "method": "rotor"}, lossy=leave)
    assert not read_record(project / "artifacts/solve/summary.json", PlanSummary).exact
    check_numbers(project, tmp_path)
    parameters = yaml.safe_load((project / "params.yaml").read_text())
    del parameters["lossy"]
    (project / "params.yaml").write_text(yaml.safe_dump(parameters))
    done = run(project, "train")
    assert done.returncode == 1
    assert "keeps values for backward in" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (project / "artifacts/train").exists()
