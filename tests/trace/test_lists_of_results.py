"""Operators that return lists beside tensors: traced, planned, written, measured, and equal to plain PyTorch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stowage.flows import fit
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
from tests.api.beside_plain import Script, adamw, equal, plainly, square, trains_equally
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


def script(operator: Any, *, rows: int = 600, width: int = 8) -> Script:
    model = Towers(operator, width)
    return Script(model, adamw(model), square, [torch.randn(rows, width) for _ in range(4)])


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
def test_trains_equally(budget: str, fit_stores: Path) -> None:
    step = trains_equally(lambda: script(own.towers), budget, cache_dir=fit_stores, check="never")
    source = step.planned.source
    assert "towers_0, (towers_1, towers_2, towers_3) = torch.ops.stowage_tests.towers.default(" in source
    measured = step.measure(torch.randn(600, 8)).peak_bytes
    assert measured <= step.plan.device_peak_bytes <= step.plan.device_budget_bytes
    assert (source.count("stowage_tests.towers.default(") > 3) == (budget != "105%"), "it runs again where it must"


def test_trains_equally_from_the_disk(fit_stores: Path, tmp_path: Path) -> None:
    def make() -> Script:
        return script(own.towers, rows=64, width=600)

    torch.manual_seed(0)
    mine = make()
    step = fit(
        mine.model,
        mine.batches[0],
        mine.optimizer,
        device_budget="60%",
        loss=mine.loss,
        quick=True,
        offload_dir=tmp_path,
        disk_budget="1GiB",
        cache_dir=fit_stores,
        say=lambda text: None,
    )
    losses = [step(batch).detach().clone() for batch in mine.batches]
    theirs = plainly(make)
    assert equal(losses, theirs["losses"])
    assert "run.reload(" in step.planned.source
    with step.on_device():
        assert equal([p.detach().clone() for p in mine.model.parameters()], theirs["parameters"])


@pytest.fixture
def sealed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reserve is for its backward alone; what other tests have learned of it is forgotten."""
    monkeypatch.setitem(operators.SEALS, FORWARD, BACKWARD)
    known = known_outputs()
    mine = {s: o for s, o in known.measured.items() if not s.startswith(FORWARD)}
    monkeypatch.setattr(known, "measured", mine)


@pytest.mark.usefixtures("sealed")
@pytest.mark.parametrize("budget", ["105%", "75%"])
def test_what_only_kernels_know(budget: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake kernels say that the reserve is empty, and that gradients have a memory each. Profiling finds what is
    true, with the real reserve in the backward's arguments: a made-up one would raise."""
    first = traced(own.gated)
    reserves = {first.storages[first.values[c.returns[1]].storage].nbytes for c in first.calls if _is(c, FORWARD)}
    assert reserves == {0}
    given: list[int] = []
    before = arguments.sealed_outputs

    def sealed_outputs(maker: Any, *rest: Any) -> Any:
        made = before(maker, *rest)
        given.append(int(made[maker.returns[1]].numel()))
        return made

    monkeypatch.setattr(arguments, "sealed_outputs", sealed_outputs)
    step = trains_equally(lambda: script(own.gated), budget, cache_dir=tmp_path, check="never")
    nbytes = 3 * 600 * 8 * 4
    assert set(given) == {nbytes}
    trace = step.planned.trace
    for call in trace.calls:
        made = [trace.values[v] for v in call.returns]
        if _is(call, FORWARD):
            assert trace.storages[made[1].storage].nbytes == nbytes
            assert made[1].shape == (nbytes,)
        if _is(call, BACKWARD):
            assert call.groups == (-1, 3)
            (storage,) = {value.storage for value in made[1:]}
            assert trace.storages[storage].nbytes == 3 * 8 * 8 * 4
            assert [value.offset for value in made[1:]] == [0, 64, 128]
    measured = step.measure(torch.randn(600, 8)).peak_bytes
    assert measured <= step.plan.device_peak_bytes <= step.plan.device_budget_bytes
    if budget == "105%":
        assert step.plan.device_peak_bytes < 1.05 * measured


def _is(call: Any, name: str) -> bool:
    return bool(call.target == f"{name}.default")


@pytest.mark.usefixtures("sealed")
def test_windows_have_lists(tmp_path: Path) -> None:
    """Executed, and written as one function: what both return is the same."""
    trace = traced(own.towers)
    calls = tuple(c for c in trace.calls if c.phase != "update" and not c.is_random)
    run = WindowRun(Window(calls, 0), trace, last_touched(trace), device_of("cpu"), "cpu")
    with torch.no_grad():
        written = run.written()
        assert written is not None
        made = written.function(*[run._given[v].clone() for v in written.reads])
    values = {v: t.clone() for v, t in run._given.items()}
    for line in run._lines:
        args = [_resolved(a, values) for a in line.args]
        result = flat_results(line.kernel(*args, **{k: _resolved(a, values) for k, a in line.kwargs.items()}))
        values.update({v: t for v, t in zip(line.returns, result, strict=True) if v >= 0})
    dead = {v for line in run._lines for v in line.dead}
    living = [v for line in run._lines for v in line.returns if v >= 0 and v not in dead]
    assert living
    assert all(torch.equal(one.nan_to_num(), values[v].nan_to_num()) for v, one in zip(living, made, strict=True))
    with torch.no_grad():
        run.times()
    assert not run.failing


def _resolved(argument: Any, values: dict[int, Any]) -> Any:
    if isinstance(argument, list):
        return [_resolved(a, values) for a in argument]
    return values[argument.value] if hasattr(argument, "value") else argument


class Doubling(nn.Module):
    """Between two layers an operator that makes 64 times as much as the step wants of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.second(own.doubled(self.first(x).tanh())[0]).tanh()
        return found


def test_what_a_step_does_without_is_freed_at_once(fit_stores: Path) -> None:
    """It is there while its call runs, and counted there; after it the step has more of its own in memory."""

    def make() -> Script:
        model = Doubling()
        return Script(model, adamw(model), square, [torch.randn(600, 8) for _ in range(3)])

    step = trains_equally(make, "105%", cache_dir=fit_stores, check="never")
    assert "_ = torch.ops.stowage_tests.doubled.default(" in step.planned.source
    large = 64 * 600 * 64 * 4
    measured = step.measure(torch.randn(600, 8)).peak_bytes
    assert large < measured <= step.plan.device_peak_bytes
    assert step.plan.device_peak_bytes < measured + large // 100, "it is counted once, where its call runs"
