"""Without leave and without freezing nothing changes: the same programs, letter for letter, and the same bits."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from stowage.flows import Lossy, fit
from stowage.flows.api.training_step import TrainingStep
from stowage.flows.planning.freezing import Freezing
from stowage.flows.planning.job import Leave, Planning, StepToPlan
from stowage.flows.planning.step import QUICK, cost_step, plan_costed
from stowage.stages.ir.errors import Infeasible
from stowage.stages.ir.lossy import GradientError
from stowage.stages.ir.trace import TraceTables
from stowage.stages.rewrite import REWRITES
from stowage.stages.rewrite.lossy import CODECS, Classes, candidates
from stowage.stages.rewrite.lossy import saved as saved_module
from stowage.stages.sensitivity import StepTensors, gradient_errors
from stowage.stages.trace import trace_step
from tests.matrix import some
from tests.solve.synthetic_steps import costs_for
from tests.zoo import ZOO

MODELS = ["gpt2", "vit", "unet"]
UPDATES = 3


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def planned(name: str, stores: Path, budget: str, **asked: Any) -> TrainingStep:
    """Return a step that is planned now: measured costs are those of other calls, solved plans are not."""
    for folder in ("solved", "options", "plans"):
        shutil.rmtree(stores / folder, ignore_errors=True)
    model, batch, loss = ZOO[name]()
    return fit(
        model, batch, adamw, device_budget=budget, loss=loss, cache_dir=stores, quick=True, say=lambda _: None, **asked
    )


def numbers(step: TrainingStep, name: str) -> tuple[list[float], list[torch.Tensor]]:
    """Return the losses and the weights of some updates."""
    batch = ZOO[name]()[1]
    torch.manual_seed(3)
    losses = [step(batch).item() for _ in range(UPDATES)]
    return losses, [p.detach().clone() for p in step.model.parameters()]


def _refuse(what: str) -> Callable[..., object]:
    def refuse(*args: object, **kwargs: object) -> object:
        raise AssertionError(f"{what} without leave")

    return refuse


@pytest.fixture
def nothing_lossy(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return what takes every lossy rewrite away, and lets no code look for values, pack them or measure errors."""

    def take_away() -> None:
        for name in CODECS:
            monkeypatch.delitem(REWRITES, name)
        for name in ("classes", "compress"):
            module = import_module(f"stowage.stages.rewrite.lossy.{name}")
            monkeypatch.setattr(module, "compress_values", _refuse("values are packed"))
            monkeypatch.setattr(module, "saved_values", _refuse("values to pack are looked for"))
        monkeypatch.setattr("stowage.flows.api.planner.gradient_errors", _refuse("errors are measured"))
        monkeypatch.setattr("stowage.flows.planning.step.solve_frozen_ways", _refuse("frozen plans are made"))
        monkeypatch.setattr(Freezing, "freezable", _refuse("something is frozen"))

    return take_away


@pytest.mark.parametrize("budget", ["90%"])
@pytest.mark.parametrize("name", MODELS)
def test_the_same_programs_and_the_same_bits(
    name: str, budget: str, fit_stores: Path, nothing_lossy: Callable[[], None]
) -> None:
    asked: Sequence[dict[str, Any]] = ({}, {"lossy": None, "freeze": None})
    steps = [planned(name, fit_stores, budget, **each) for each in asked]
    nothing_lossy()
    steps.append(planned(name, fit_stores, budget))
    first = steps[0]
    assert first.plan.exact
    assert first.plan.lossy == ()
    assert first.plan.gradient_error == 0.0
    assert first.planned.units == []
    losses, weights = numbers(first, name)
    for other in steps[1:]:
        assert other.planned.source == first.planned.source
        assert other.plan.plan_hash == first.plan.plan_hash
        assert other.planned.rows == first.planned.rows
        other_losses, other_weights = numbers(other, name)
        assert other_losses == losses
        assert all(map(torch.equal, other_weights, weights))


@pytest.mark.parametrize("name", some(MODELS, keep=["unet"]))
def test_leave_that_a_plan_may_not_use_changes_no_plan(
    name: str, fit_stores: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step is costed with its lossy variants, and planned without: as if they were not there."""
    monkeypatch.setattr(saved_module, "SMALLEST", 64)
    model, batch, loss = ZOO[name]()

    def errors(trace: TraceTables, lossy: Lossy) -> list[GradientError]:
        return gradient_errors(trace, lossy.kinds, [StepTensors.of(model, batch)])

    how = Planning(stores=fit_stores, effort=QUICK)
    plain = cost_step(StepToPlan(model=model, batch=batch, loss=loss), how)
    leave = Leave(Lossy(["bf16", "int8", "int4_group"], 0.05), errors)
    costed = cost_step(StepToPlan(model=model, batch=batch, loss=loss, leave=leave), how)
    assert len(costed.variants) > len(plain.variants)
    compared = 0
    for budget in ("50%", "75%", "95%"):
        texts = []
        for each in (plain, costed):
            shutil.rmtree(fit_stores / "solved", ignore_errors=True)
            try:
                texts.append(plan_costed(each, budget, how).source)
            except Infeasible as failure:
                texts.append(str(failure))
        assert texts[0] == texts[1]
        compared += "run." in texts[0]
    assert compared


@pytest.mark.parametrize("name", some(["gpt2", "resnet"], keep=["resnet"]))
def test_a_limit_of_nothing_allows_what_changes_nothing(
    name: str, fit_stores: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All kinds are allowed, and only ReLU's bit is within a limit of 0: the numbers are those without leave."""
    monkeypatch.setattr(saved_module, "SMALLEST", 64)
    step = planned(name, fit_stores, "80%", lossy=Lossy("all", 0))
    assert step.plan.exact
    assert step.plan.gradient_error == 0.0
    assert all(each.startswith("relu1bit: ") for each in step.plan.lossy)
    losses, weights = numbers(step, name)
    plain_losses, plain_weights = numbers(planned(name, fit_stores, "80%"), name)
    assert losses == plain_losses
    assert all(map(torch.equal, weights, plain_weights))


def test_a_limit_of_nothing_admits_no_kind_whose_error_is_none_by_chance() -> None:
    """A batch may be such that codes change nothing in its gradient; another will not be."""
    model, batch, loss = ZOO["resnet"]()
    trace = trace_step(model, batch, loss=loss)
    kinds = ("int8", "bf16", "relu1bit")
    found = Classes(trace)
    costs = {c.signature: c for c in costs_for(trace).values()} | {
        c.signature: c for made in found.everywhere(kinds) for c in costs_for(made).values()
    }
    none = [GradientError(kind, name, 0.0) for kind, name in found.members(kinds)]
    assert {c.rewrite for c in candidates(trace, costs, none, Lossy(kinds, 0))} <= {"relu1bit"}
    assert {c.rewrite for c in candidates(trace, costs, none, Lossy(kinds, 1e-9))} >= {"int8", "bf16"}
