"""Optimizers as people bring them: ready-made, with groups, schedules and master weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stowage.flows import MasterWeights, fit
from stowage.stages.ir.errors import ParameterError, StowageError
from tests.configurations.alongside import Plain, assert_equal, assert_measured, batches, small_gpt2
from tests.matrix import some
from tests.runtime.beside_eager import differences, same

Fit = Callable[..., Any]
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


@pytest.fixture
def quick(fit_stores: Path) -> Fit:
    """`fit` that plans in seconds and says nothing."""
    return partial(fit, cache_dir=fit_stores, quick=True, device_budget="110%", say=lambda text: None)


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Weights decay, biases and norms do not and learn faster; the position embedding has a group of its own."""
    named = dict(model.named_parameters())
    special = "transformer.wpe.weight"
    return [
        {"params": [p for n, p in named.items() if p.ndim > 1 and n != special], "weight_decay": 0.1},
        {"params": [p for p in named.values() if p.ndim == 1], "weight_decay": 0.0, "lr": 3e-2},
        {"params": [named[special]], "betas": (0.8, 0.9)},
    ]


def masters(model: nn.Module) -> torch.optim.Optimizer:
    return MasterWeights(groups(model), torch.optim.AdamW, lr=1e-2)


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "AdamW in groups": lambda m: torch.optim.AdamW(groups(m), lr=1e-2),
    "fused AdamW": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True),
    "SGD with momentum": lambda m: torch.optim.SGD(m.parameters(), lr=1e-1, momentum=0.9),
    "SGD": lambda m: torch.optim.SGD(m.parameters(), lr=1e-1),
    "Adafactor": lambda m: torch.optim.Adafactor(m.parameters(), lr=1e-2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_ready_optimizer_in_every_kind_of_micro_batch(name: str, quick: Fit) -> None:
    model, other = small_gpt2(), small_gpt2()
    given = batches(model, 6)
    optimizer = OPTIMIZERS[name](model)
    step = quick(model, given[0], optimizer, max_grad_norm=0.5, accumulate=2)
    assert step.optimizer is optimizer
    assert_equal(step, Plain(other, OPTIMIZERS[name](other), max_grad_norm=0.5), given, [False, True] * 3)


def test_a_schedule_moves_every_group(quick: Fit) -> None:
    model, other = small_gpt2(), small_gpt2()
    given = batches(model, 1)
    make = OPTIMIZERS["AdamW in groups"]
    step = quick(model, given[0], make(model), max_grad_norm=0.5)
    plain = Plain(other, make(other), max_grad_norm=0.5)
    schedules = [torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.1, 4) for o in (step.optimizer, plain.optimizer)]
    for _ in range(4):
        assert_equal(step, plain, given, [True])
        for schedule in schedules:
            schedule.step()
    rates = [group["lr"] for group in step.optimizer.param_groups]
    assert rates == [group["lr"] for group in plain.optimizer.param_groups]
    assert rates == pytest.approx([1e-3, 3e-3, 1e-3])


def low_precision(**changes: Any) -> nn.Module:
    return small_gpt2(**changes).bfloat16()


@pytest.mark.parametrize("accumulate", some([1, 2], keep=[2]))
def test_master_weights(accumulate: int, quick: Fit) -> None:
    model, other = low_precision(), low_precision()
    given = batches(model, 3 * accumulate)
    step = quick(
        model,
        given[0],
        masters(model),
        max_grad_norm=0.5,
        accumulate=accumulate,
        method="rockmate",
        device_budget="98%",
    )
    plain = Plain(other, masters(other), max_grad_norm=0.5)
    assert_equal(step, plain, given, [(i + 1) % accumulate == 0 for i in range(len(given))])
    for i in range(accumulate):
        assert_measured(step, given[0], update=i == accumulate - 1)
    storages = step.planned.trace.storages
    of_masters = {s.name: s.nbytes for s in storages if s.role == "state" and s.name.endswith("::master")}
    assert of_masters == {f"{n}::master": 4 * p.numel() for n, p in model.named_parameters()}


@pytest.mark.parametrize("inner", [torch.optim.AdamW, torch.optim.SGD])
def test_master_weights_are_what_people_write_by_hand(inner: type[torch.optim.Optimizer]) -> None:
    model, other = low_precision(), low_precision()
    optimizer = MasterWeights(model.parameters(), inner, lr=1e-2, weight_decay=0.1)
    copies = [nn.Parameter(p.detach().float()) for p in other.parameters()]
    by_hand = inner(copies, lr=1e-2, weight_decay=0.1)  # type: ignore[call-arg]
    for batch in batches(model, 4):
        torch.manual_seed(0)
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.manual_seed(0)
        other(**batch).loss.backward()
        for copy, parameter in zip(copies, other.parameters()):
            copy.grad = parameter.grad.float()
            parameter.grad = None
        by_hand.step()
        with torch.no_grad():
            for copy, parameter in zip(copies, other.parameters()):
                parameter.copy_(copy)
    assert differences(model, other) == []
    assert all(same(optimizer.state[p]["master"], c.detach()) for p, c in zip(model.parameters(), copies))


def test_master_weights_come_back_as_they_were_saved(quick: Fit) -> None:
    """Rounded to bfloat16, masters would lose what they are for."""
    model, other = low_precision(), low_precision()
    given = batches(model, 4)
    step = quick(model, given[0], masters(model))
    torch.manual_seed(0)
    for batch in given[:2]:
        step(batch)
    other.load_state_dict(model.state_dict())
    resumed = masters(other)
    resumed.load_state_dict(step.optimizer.state_dict())
    assert same(resumed.state_dict(), step.optimizer.state_dict())
    again = quick(other, given[0], resumed)
    for batch in given[2:]:
        torch.manual_seed(1)
        step(batch)
        torch.manual_seed(1)
        again(batch)
    assert differences(model, other) == []
    assert same(resumed.state_dict(), step.optimizer.state_dict())


def test_master_weights_leave_float32_alone() -> None:
    model, other = small_gpt2(), small_gpt2()
    optimizers = (
        MasterWeights(model.parameters(), torch.optim.AdamW, lr=1e-2),
        torch.optim.AdamW(other.parameters(), 1e-2),
    )
    batch = batches(model, 1)[0]
    for m, optimizer in zip((model, other), optimizers):
        for _ in range(2):
            torch.manual_seed(0)
            m(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert differences(model, other) == []
    assert same(optimizers[0].state_dict()["state"], optimizers[1].state_dict()["state"])


def test_frozen_parameters(quick: Fit) -> None:
    def build() -> nn.Module:
        model = small_gpt2()
        model.get_submodule("transformer.wpe").requires_grad_(False)
        model.get_submodule("transformer.h.0").requires_grad_(False)
        return model

    model, other = build(), build()
    given = batches(model, 4)
    make = OPTIMIZERS["AdamW in groups"]  # holds the frozen ones too
    before = model.get_parameter("transformer.h.0.mlp.c_fc.weight").clone()
    step = quick(model, given[0], make(model), max_grad_norm=0.5, accumulate=2)
    assert_equal(step, Plain(other, make(other), max_grad_norm=0.5), given, [False, True] * 2)
    assert torch.equal(before, model.get_parameter("transformer.h.0.mlp.c_fc.weight"))
    assert not any("h.0." in s.name for s in step.planned.trace.storages if s.role in ("state", "gradient"))


class Local(torch.optim.SGD):
    """For the next test: hidden inside a function it cannot be imported."""


def test_what_is_refused_is_one_sentence(quick: Fit) -> None:
    model = small_gpt2()
    batch = batches(model, 1)[0]

    class Hidden(torch.optim.SGD):
        pass

    wrong: list[tuple[str, Callable[[], Any]]] = [
        ("closure", lambda: torch.optim.LBFGS(model.parameters())),
        ("none of the model's", lambda: torch.optim.SGD(small_gpt2().parameters(), lr=0.1)),
        ("optimizer gives a str", lambda: lambda parameters: "AdamW"),
        ("define the optimizer at the top", lambda: MasterWeights(model.parameters(), Hidden, lr=0.1)),
        ("needs the class", lambda: MasterWeights(model.parameters(), lr=0.1)),
    ]
    for words, make in wrong:
        with pytest.raises(StowageError, match=words) as caught:
            quick(model, batch, make())
        assert "\n" not in str(caught.value)
    assert isinstance(MasterWeights(model.parameters(), Local, lr=0.1), torch.optim.Optimizer)
    with pytest.raises(ParameterError):
        quick(model, batch, OPTIMIZERS["SGD"](model), max_grad_norm=0)
