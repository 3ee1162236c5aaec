"""`lossy` in params.yaml, through all stages: a plan with codes trains, resumes when killed, and needs leave."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from stowage.stages.ir.lossy import ERRORS, GradientError
from stowage.stages.ir.table import read_rows
from tests.devices import COMPUTING_COSTS_MOST, write_device
from tests.train.test_killed_processes import PARAMETERS, PLANNING, TRAINED, check_that_a_kill_changes_nothing, run

KINDS = ["bf16", "int8_tensor"]


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with leave, planned and not trained."""
    parameters: dict[str, Any] = copy.deepcopy(PARAMETERS)
    parameters["trace"]["model"]["overrides"] |= {"n_embd": 32, "n_positions": 32}
    parameters["trace"] |= {"batch_size": 4, "sequence_length": 32}
    parameters["solve"]["device_budget"] = "50%"
    parameters["train"]["steps"] = 30
    parameters["lossy"] = {"kinds": KINDS, "max_gradient_error": 0.05, "batches": 2}
    folder = tmp_path_factory.mktemp("lossy") / "project"
    folder.mkdir()
    (folder / "params.yaml").write_text(yaml.safe_dump(parameters))
    write_device(folder, **COMPUTING_COSTS_MOST)
    done = run(folder, *PLANNING)
    assert done.returncode == 0, done.stderr
    return folder


def test_the_plan_says_what_it_keeps(planned: Path) -> None:
    summary = json.loads((planned / "artifacts/solve/summary.json").read_text())
    assert not summary["exact"]
    assert {text.split(":")[0] for text in summary["lossy"]} <= set(KINDS)
    assert 0 < summary["gradient_error"] <= 0.05
    errors = read_rows(planned / "artifacts/trace" / ERRORS, GradientError)
    assert {row.kind for row in errors} == set(KINDS)
    source = (planned / "artifacts/codegen/step.py").read_text()
    assert all(f"- {text}" in source for text in summary["lossy"])


@pytest.mark.long
def test_a_run_that_was_killed_ends_like_one_that_was_not(planned: Path, tmp_path: Path) -> None:
    check_that_a_kill_changes_nothing(planned, tmp_path)


def test_a_colleague_without_leave_does_not_train_with_it(planned: Path, tmp_path: Path) -> None:
    folder = tmp_path / "project"
    shutil.copytree(planned, folder, ignore=shutil.ignore_patterns(*TRAINED))
    parameters = yaml.safe_load((folder / "params.yaml").read_text())
    del parameters["lossy"]
    (folder / "params.yaml").write_text(yaml.safe_dump(parameters))
    done = run(folder, "train")
    assert done.returncode != 0
    assert "keeps values for backward in" in done.stderr
    assert not (folder / "artifacts/train").exists()


def test_a_summary_that_was_altered_does_not_hide_codes(planned: Path, tmp_path: Path) -> None:
    """The step is made from the variant's name, which tables and step.py go with."""
    folder = tmp_path / "project"
    shutil.copytree(planned, folder, ignore=shutil.ignore_patterns(*TRAINED))
    path = folder / "artifacts/solve/summary.json"
    summary = json.loads(path.read_text())
    assert any(f"{kind}[" in summary["variant"] for kind in KINDS)
    path.write_text(json.dumps(summary | {"exact": True, "lossy": [], "lossy_effects": [], "gradient_error": 0.0}))
    parameters = yaml.safe_load((folder / "params.yaml").read_text())
    del parameters["lossy"]
    (folder / "params.yaml").write_text(yaml.safe_dump(parameters))
    done = run(folder, "train")
    assert done.returncode != 0
    assert "keeps values for backward in" in done.stderr
    assert not (folder / "artifacts/train").exists()
