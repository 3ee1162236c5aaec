"""bfloat16 by `torch.autocast`: the casts are part of the plan."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from stowage.flows import fit
from stowage.stages.workload.randomness import seeded
from tests.configurations.alongside import Plain, assert_equal, assert_measured, batches, small_gpt2
from tests.matrix import some

Fit = Callable[..., Any]


@pytest.fixture
def quick(fit_stores: Path) -> Fit:
    """`fit` that plans in seconds and says nothing."""
    return partial(fit, cache_dir=fit_stores, quick=True, device_budget="120%", say=lambda text: None)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def autocast() -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16)


@pytest.mark.parametrize("accumulate", some([1, 2, 3], keep=[1]))
def test_equal_to_eager(accumulate: int, quick: Fit) -> None:
    """Forward and loss under autocast, backward and update outside of it."""
    model, other = small_gpt2(), small_gpt2()
    given = batches(model, 3 * accumulate)
    with autocast():
        step = quick(
            model,
            given[0],
            adamw,
            max_grad_norm=0.5,
            accumulate=accumulate,
            method="rockmate",
            device_budget="95%",
        )
    plain = Plain(other, adamw(other.parameters()), max_grad_norm=0.5, around=autocast)
    assert_equal(step, plain, given, [(i + 1) % accumulate == 0 for i in range(len(given))], around=autocast)
    for i in range(accumulate):
        with autocast():
            assert_measured(step, given[0], update=i == accumulate - 1)
    assert any("bfloat16" in c.arguments for c in step.planned.trace.calls)


class UsedTwice(nn.Module):
    """One weight in two products, another in three."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> Any:
        for _ in range(2):
            x = torch.tanh(self.layer(x))
        return self.last(x).float().pow(2).mean() + F.linear(x, self.last.weight).sum() + self.last(x).sum()


class CastsItself(UsedTwice):
    """Autocast inside forward, as some models have it."""

    def forward(self, x: torch.Tensor) -> Any:
        with autocast():
            return super().forward(x)


@pytest.mark.parametrize("kind", [UsedTwice, CastsItself])
def test_a_weight_is_cast_once_however_often_it_is_used(kind: type[nn.Module], quick: Fit) -> None:
    with seeded(0):
        model, other = kind(), kind()
    other.load_state_dict(model.state_dict())
    given = [(torch.randn(8, 16, generator=torch.Generator().manual_seed(i)),) for i in range(4)]
    around = autocast if kind is UsedTwice else torch.enable_grad
    with around():
        step = quick(model, given[0], adamw)
    plain = Plain(other, adamw(other.parameters()), lambda outputs, batch: outputs, around=around)
    assert_equal(step, plain, given, [True] * 4, around=around)
    trace = step.planned.trace
    weights = {v.value: v.source for v in trace.values if v.source.endswith(".weight")}
    casts = [weights[c.reads[0]] for c in trace.calls if c.target == "aten._to_copy.default" and c.reads[0] in weights]
    assert sorted(casts) == ["parameter:last.weight", "parameter:layer.weight"]


def test_with_and_without_are_two_plans(quick: Fit) -> None:
    model, other = small_gpt2(), small_gpt2()
    given = batches(model, 1)
    step = quick(model, given[0], adamw)
    plain = Plain(other, adamw(other.parameters()))
    assert_equal(step, plain, given, [True])
    whole = step.plan.configuration_hash
    plain.around = autocast
    assert_equal(step, plain, given, [True], around=autocast)
    assert step.plan.configuration_hash != whole
    assert torch.is_autocast_cache_enabled()
