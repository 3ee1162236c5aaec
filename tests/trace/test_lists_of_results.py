"""Operators that return lists beside tensors: traced, planned, written, measured, and equal to plain PyTorch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stowage.stages.device import device_of
from stowage.stages.ir import operators
from stowage.stages.ir.errors import TableError
from stowage.stages.ir.results import flat_results, grouped, groups_of, places
from stowage.stages.ir.trace import TraceTables
from stowage.stages.kernels import known_outputs
from stowage.stages.profile import arguments
from stowage.stages.profile.sequence import WindowRun, last_touched
from stowage.stages.profile.windows import Window
from stowage.stages.trace import trace_step
from tests.fit.beside_plain import Script, adamw, square, trains_equally
from tests.lists_of_results import BACKWARD, FORWARD, Towers, own

RESULTS: list[Any] = [1, (1, 2), [1], (1, [2, 3], 4), ([], 1), ([1],), (1, 2, 3, [])]


@pytest.mark.parametrize("result", RESULTS, ids=str)
def test_flat_and_back(result: Any) -> None:
    flat, groups = flat_results(result), groups_of(result)
    back = grouped(flat, groups)
    assert back == (list(result) if isinstance(result, (list, tuple)) else [result])
    for place, item in zip(places(groups, len(flat)), flat, strict=True):
        found: Any = back
        for index in place:
            found = found[index]
        assert found == item


def script(operator: Any, count: int = 4) -> Script:
    model = Towers(operator)
    return Script(model, adamw(model), square, [torch.randn(600, 8) for _ in range(count)])


def traced(operator: Any) -> TraceTables:
    torch.manual_seed(0)
    made = script(operator)
    return trace_step(made.model, made.batches[0], loss=made.loss, optimizer=made.optimizer)


def test_tables(tmp_path: Path) -> None:
    trace = traced(own.towers)
    forward = [c for c in trace.calls if c.target == "stowage_tests.towers.default"]
    assert [c.groups for c in forward] == [(-1, 3)] * 3
    assert all(len(c.returns) == 4 for c in forward)
    for value in trace.values:
        if value.call >= 0:
            assert trace.calls[value.call].returns[value.output] == value.value
    assert all(c.groups == () for c in trace.calls if not c.target.startswith("stowage_tests"))
    trace.save(tmp_path)
    assert TraceTables.load(tmp_path) == trace
    damaged = [replace(c, groups=(-1, 4)) if c is forward[0] else c for c in trace.calls]
    with pytest.raises(TableError, match="do not belong together"):
        replace(trace, calls=damaged).check()


@pytest.mark.parametrize("budget", ["105%", "75%"])
def test_trains_equally(budget: str, fit_home: Path) -> None:
    step = trains_equally(lambda: script(own.towers), budget, cache_dir=fit_home, check="never")
    source = step.planned.source
    assert "towers_0, (towers_1, towers_2, towers_3) = torch.ops.stowage_tests.towers.default(" in source
    measured = step.measure(torch.randn(600, 8)).peak_bytes
    assert measured <= step.plan.device_peak_bytes <= step.plan.device_budget_bytes
    assert (source.count("stowage_tests.towers.default(") > 3) == (budget != "105%"), "it runs again where it must"


def test_trains_equally_from_the_disk(fit_home: Path, tmp_path: Path) -> None:
    step = trains_equally(
        lambda: script(own.towers), "60%", cache_dir=fit_home, check="never", offload_dir=tmp_path, disk_budget="1GiB"
    )
    assert step.planned.slots
