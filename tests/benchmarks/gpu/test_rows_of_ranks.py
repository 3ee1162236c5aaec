"""Rows of the page of several GPUs, from what its contestants found."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from stowage.flows.benchmarks.gpu.ranks.rows import rows_of
from stowage.flows.benchmarks.gpu.ranks.whole import job_of_ranks, steps_of_ranks
from stowage.flows.benchmarks.gpu.steps import StepResult
from stowage.stages.ir.errors import ParameterError


def test_each_contestant_has_a_row_and_none_without_numbers(tmp_path: Path) -> None:
    steps = steps_of_ranks(job_of_ranks("cpu"), 2, tmp_path, 7, True)
    results = {s.name: StepResult(s.name, "held", numbers={"peak_bytes": 9, "step_s": 0.5}) for s in steps}
    names = [s.name for s in steps if s.asked["kind"] == "ranks-train"]
    compared = {name: {"equal": name != "fsdp2"} for name in names}
    results["compare"] = replace(results["compare"], numbers=compared)
    rows = rows_of(steps, results)
    assert [row["equal"] for row in rows] == ["", "not equal", *["equal"] * (len(names) - 2)]
    assert all((row["peak_bytes"], row["step_s"]) == (9, 0.5) for row in rows)
    for name in (names[-1], "compare"):
        fallen = {**results, name: replace(results[name], status="fell", why="it died")}
        with pytest.raises(ParameterError, match=f"'{name}' gave no numbers .*it died"):
            rows_of(steps, fallen)
