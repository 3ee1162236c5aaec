"""`solve.freeze` and `lossy` with `top10` in params.yaml: what is frozen keeps a tenth, through all stages."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from stowage.stages.ir.graph import ComputeNode
from stowage.stages.ir.plan import PlanSummary
from stowage.stages.ir.table import read_record, read_rows
from stowage.stages.rewrite import is_for_freezing
from tests.devices import COMPUTING_COSTS_MOST, write_device
from tests.train.test_killed_processes import PARAMETERS, PLANNING, check_that_a_kill_changes_nothing, run

BUDGET = "smallest"


@pytest.mark.long
def test_normalisations_that_are_frozen_keep_a_tenth(tmp_path: Path) -> None:
    parameters: dict[str, Any] = copy.deepcopy(PARAMETERS)
    parameters["trace"]["model"]["overrides"] |= {"n_embd": 32, "n_positions": 32}
    parameters["trace"] |= {"batch_size": 4, "sequence_length": 32}
    parameters["solve"] |= {"device_budget": BUDGET, "method": "rotor", "freeze": {"rate": 0.9, "policy": "random"}}
    parameters["train"]["steps"] = 12
    parameters["lossy"] = {"kinds": ["top10"], "max_gradient_error": 2.0}
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "params.yaml").write_text(yaml.safe_dump(parameters))
    write_device(folder, **COMPUTING_COSTS_MOST)
    done = run(folder, *PLANNING)
    assert done.returncode == 0, done.stderr
    nodes = read_rows(folder / "artifacts/partition/nodes.parquet", ComputeNode)
    assert any(is_for_freezing(node.variant) for node in nodes)
    summary = read_record(folder / "artifacts/solve/summary.json", PlanSummary)
    assert any(text.startswith("top10") for text in summary.lossy)
    assert "aten.copy_.default(" in (folder / "artifacts/codegen/step.py").read_text()
    check_that_a_kill_changes_nothing(folder, tmp_path)
