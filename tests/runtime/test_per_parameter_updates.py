"""Updating one parameter at a time gives the numbers of `optimizer.step()`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from stowage.stages.runtime import PerParameterUpdates
from tests.matrix import some
from tests.runtime.beside_eager import assert_equal_training, prepare, same
from tests.zoo import ZOO

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "AdamW amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    "AdamW for loop": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
    "Adam fused": lambda p: torch.optim.Adam(p, lr=1e-2, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, lr_decay=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5, centered=True),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-3),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=1e-1),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=1e-3),
}


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Weights decay, biases do not and learn faster: the usual groups."""
    weights = [p for p in model.parameters() if p.ndim > 1]
    biases = [p for p in model.parameters() if p.ndim <= 1]
    return [{"params": weights, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0, "lr": 3e-2}]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_parameter_at_a_time(name: str) -> None:
    """In any order, with groups, over several steps."""
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    whole, single = (OPTIMIZERS[name](groups_of(m)) for m in models)
    updates = PerParameterUpdates(single, dict(models[1].named_parameters()))
    assert updates.names() == {n for n, _ in models[1].named_parameters()}
    for step in range(4):
        gradients = {n: torch.randn_like(p) for n, p in models[0].named_parameters()}
        for n, p in models[0].named_parameters():
            p.grad = gradients[n].clone()
        whole.step()
        for n in sorted(gradients, reverse=bool(step % 2)):
            updates(n, gradients[n].clone())
        assert all(same(a.detach(), b.detach()) for a, b in zip(models[0].parameters(), models[1].parameters()))
        assert same(whole.state_dict(), single.state_dict())
    assert all(p.grad is None for p in models[1].parameters())


@pytest.mark.parametrize(
    "name", some(["SGD momentum", "Adagrad", "RMSprop", "NAdam", "Adafactor"], keep=["RMSprop", "Adafactor"])
)
def test_under_the_tightest_plan(name: str) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return OPTIMIZERS[name](groups_of(model))

    prepared = prepare(ZOO["tied"], make)
    assert_equal_training(ZOO["tied"], prepared, prepared.smallest(), optimizer=make, iterations=4)


def test_small_parameters_are_updated() -> None:
    """Single numbers and one-element biases like any other."""
    model = nn.Linear(1, 1)
    before = [p.detach().clone() for p in model.parameters()]
    updates = PerParameterUpdates(torch.optim.SGD(model.parameters(), lr=1.0), dict(model.named_parameters()))
    for name, parameter in model.named_parameters():
        updates(name, torch.ones_like(parameter))
    assert all(torch.equal(p, old - 1) for p, old in zip(model.parameters(), before))


@pytest.mark.filterwarnings("error")
def test_a_schedule_sees_one_step_an_iteration() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    updates = PerParameterUpdates(optimizer, dict(model.named_parameters()))
    for iteration in range(3):
        assert optimizer.param_groups[0]["lr"] == 0.5**iteration
        for name, parameter in model.named_parameters():
            updates(name, torch.zeros_like(parameter))
        schedule.step()


def test_groups_are_whole_again_after_an_update_that_fails() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    updates = PerParameterUpdates(optimizer, dict(model.named_parameters()))
    with pytest.raises(RuntimeError):
        updates("weight", torch.zeros(3, 3))
    assert len(optimizer.param_groups[0]["params"]) == 2
    assert model.weight.grad is None
