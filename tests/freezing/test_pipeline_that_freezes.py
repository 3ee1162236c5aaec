"""`solve.freeze` in params.yaml: stages plan for the worst mask, train as plain PyTorch does, and go on when killed."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.devices import write_device
from tests.train.test_killed_processes import PARAMETERS, PLANNING, TRAINED, check_that_a_kill_changes_nothing, run


def made(folder: Path, **freeze: Any) -> Path:
    """A project that freezes, planned and not trained."""
    parameters: dict[str, Any] = copy.deepcopy(PARAMETERS)
    parameters["solve"]["freeze"] = freeze
    parameters["train"] |= {"steps": 30, "compare_eager": True}
    folder.mkdir()
    (folder / "params.yaml").write_text(yaml.safe_dump(parameters))
    write_device(folder)
    done = run(folder, *PLANNING)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project of most tests."""
    return made(tmp_path_factory.mktemp("freezes") / "project", rate=0.8, policy="ils")


def test_the_plan_says_what_it_freezes(planned: Path) -> None:
    summary = json.loads((planned / "artifacts/solve/summary.json").read_text())
    units, active = summary["units"], summary["active_units"]
    assert active == units - int(0.8 * units) < units
    assert len(summary["worst_units"]) <= active
    assert summary["device_peak_bytes"] <= min(summary["device_budget_bytes"], summary["all_active_bytes"])
    assert summary["step_time_s"] < summary["all_active_time_s"]
    assert "if run.active(" in (planned / "artifacts/codegen/step.py").read_text()


def test_a_run_that_was_killed_ends_like_one_that_was_not(planned: Path, tmp_path: Path) -> None:
    """Plain PyTorch trains beside it with the same masks: the stage fails if a loss differs in one bit."""
    check_that_a_kill_changes_nothing(planned, tmp_path)


@pytest.mark.parametrize(
    ("freeze", "sentence"),
    [
        ({"rate": 2.0}, "solve.freeze.rate"),
        ({"policy": "best"}, "solve.freeze.policy"),
        ({"unit": "block"}, "solve.freeze.unit is not a known key; rename it to solve.freeze.units"),
    ],
)
def test_wrong_keys(planned: Path, freeze: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    folder = tmp_path / "project"
    shutil.copytree(planned, folder, ignore=shutil.ignore_patterns(*TRAINED))
    parameters = yaml.safe_load((folder / "params.yaml").read_text())
    parameters["solve"]["freeze"] = freeze
    (folder / "params.yaml").write_text(yaml.safe_dump(parameters))
    done = run(folder, "solve")
    assert done.returncode != 0
    assert sentence in done.stderr
