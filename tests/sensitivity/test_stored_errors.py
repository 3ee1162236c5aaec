"""What codes do to gradients is measured once for a step, its weights and its batches, and again where any differs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from stowage.flows import fit
from stowage.flows.api import planner
from stowage.stages.ir.lossy import GradientError, Lossy
from stowage.stages.ir.trace import TraceTables
from stowage.stages.sensitivity import ErrorStore, StepTensors
from stowage.stages.trace import trace_step

KINDS = ("bf16", "int8")


def made() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.BatchNorm1d(16), nn.Linear(16, 4)), torch.rand(6, 8)


def traced(model: nn.Module, batch: torch.Tensor) -> TraceTables:
    return trace_step(model, batch, loss=lambda outputs, _: outputs.square().mean())


def key(model: nn.Module, *batches: torch.Tensor, kinds: tuple[str, ...] = KINDS) -> str:
    live = [StepTensors.of(model, batch) for batch in batches]
    return ErrorStore(Path()).key(traced(model, batches[0]), kinds, live)


def test_equal_steps_with_equal_tensors_have_one_key() -> None:
    model, batch = made()
    again, same = made()
    assert key(model, batch) == key(again, same)


def test_elements_count_and_not_where_they_lie() -> None:
    model, batch = made()
    trace = traced(model, batch)
    store, transposed = ErrorStore(Path()), batch.T.contiguous().T
    one, other = (store.key(trace, KINDS, [StepTensors.of(model, each)]) for each in (batch, transposed))
    assert one == other


CHANGES: dict[str, Callable[[nn.Module, torch.Tensor], object]] = {
    "a weight": lambda model, batch: model[3].weight.data[3, 15].add_(1e-6),
    "a buffer": lambda model, batch: model[2].running_var[15].add_(1e-6),
    "the batch": lambda model, batch: batch[5, 7].add_(1e-6),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
def test_whatever_changes_an_element_changes_the_key(change: Callable[..., object]) -> None:
    model, batch = made()
    before = key(model, batch)
    change(model, batch)
    assert key(model, batch) != before


def test_kinds_batches_and_the_step_change_the_key() -> None:
    model, batch = made()
    keys = {key(model, batch), key(model, batch, kinds=("bf16",)), key(model, batch, batch + 1)}
    relu = nn.Sequential(model[0], nn.ReLU(), *model[2:])
    assert len({*keys, key(relu, batch)}) == 4


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.int64])
def test_tensors_of_any_type_count(dtype: torch.dtype) -> None:
    model, batch = made()
    store, trace, live = ErrorStore(Path()), traced(model, batch), StepTensors.of(model, batch)
    ones, zeros = torch.ones(3).to(dtype), torch.zeros(3).to(dtype)
    keys = {
        store.key(trace, KINDS, [replace(live, outside={"mask": mask})]) for mask in (ones, zeros, ones[0], ones[:0])
    }
    assert len(keys) == 4


def test_what_was_kept_comes_back_and_a_damaged_table_does_not(tmp_path: Path) -> None:
    store = ErrorStore(tmp_path / "errors")
    errors = [GradientError("bf16", "0", 1e-9), GradientError("int8", "0", math.inf)]
    assert store.find("some") is None
    store.add("some", errors)
    assert store.find("some") == errors
    path = tmp_path / "errors/some.parquet"
    path.write_bytes(path.read_bytes()[:40])
    assert store.find("some") is None


def test_a_second_call_of_fit_measures_nothing_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[int] = []
    kept = planner.gradient_errors
    monkeypatch.setattr(planner, "gradient_errors", lambda *a, **k: measured.append(1) or kept(*a, **k))

    def plan(budget: str, weight: float = 0.0) -> tuple[float, tuple[str, ...]]:
        model, batch = made()
        model[0].bias.data[0] += weight
        step = fit(
            model,
            batch,
            loss=lambda outputs, _: outputs.square().mean(),
            device_budget=budget,
            lossy=Lossy(KINDS),
            cache_dir=tmp_path,
            quick=True,
            say=lambda text: None,
        )
        return step.plan.gradient_error, step.plan.lossy

    first = plan("97%")
    assert len(measured) == 1
    assert plan("97%") == first
    plan("98%")
    assert len(measured) == 1
    plan("97%", 0.5)
    assert len(measured) == 2
