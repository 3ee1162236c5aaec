"""Rows of the page of several GPUs, from what its contestants found."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stowage.flows.benchmarks.gpu.ranks.rows import rows_of
from stowage.flows.benchmarks.gpu.ranks.whole import RanksEffort, job_of_ranks, steps_of_ranks
from stowage.flows.benchmarks.gpu.steps import StepResult
from stowage.flows.benchmarks.pages.measurement import Measurement
from stowage.flows.benchmarks.pages.ranks_tables import RANKS
from stowage.flows.benchmarks.pages.write import table_of
from stowage.stages.ir.errors import ParameterError


def measurement(rows: list[dict[str, Any]]) -> Measurement:
    return Measurement("several_gpus", "2026-01-01", "here", {}, "", rows)


def test_each_contestant_has_a_row_and_none_without_numbers(tmp_path: Path) -> None:
    steps = steps_of_ranks(job_of_ranks("cpu"), 2, tmp_path, RanksEffort(7, rounds=2, quick=True))
    numbers = {"peak_bytes": 9, "seconds": [0.4, 0.5, 0.6]}
    results = {s.name: StepResult(s.name, "held", numbers=numbers) for s in steps}
    names = [s.name for s in steps if s.asked["kind"] == "ranks-train" and "again" not in s.asked]
    later = results[f"{names[0]}-round-2"]
    results[later.step] = replace(later, numbers={"peak_bytes": 9, "seconds": [0.7, 0.8]})
    refused = {"refused": "it does not fit", "needed_bytes": 11, "budget_bytes": 10}
    results["sharded-ddp"] = replace(results["sharded-ddp"], numbers=refused)
    compared = {name: {"equal": name != "fsdp2"} for name in names}
    results["compare"] = replace(results["compare"], numbers=compared)
    rows = rows_of(steps, results)
    assert [row["equal"] for row in rows] == ["", "not equal", *["equal"] * (len(names) - 3), "nothing fits"]
    assert all((row["peak_bytes"], row["step_s"]) == (9, 0.5) for row in rows[1:-1])
    assert (rows[0]["low_s"], rows[0]["step_s"], rows[0]["high_s"]) == (0.5, 0.6, 0.7)
    last = rows[-1]
    assert (last["budget_bytes"], last["predicted_bytes"], last.get("peak_bytes")) == (10, 11, None)
    table = table_of(RANKS, measurement(rows))
    assert "a quarter below" in table
    old = [{name: value for name, value in row.items() if name not in ("low_s", "high_s")} for row in rows]
    assert "a quarter below" not in table_of(RANKS, measurement(old)), "the page of one round"
    for name in (names[-1], "compare"):
        fallen = {**results, name: replace(results[name], status="fell", why="it died")}
        with pytest.raises(ParameterError, match=f"'{name}' gave no numbers .*it died"):
            rows_of(steps, fallen)
