"""A step that freezes says where plain PyTorch computes with other kernels while parameters are frozen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from stowage.flows import Freeze, fit
from stowage.stages.ir.by_training import BY_TRAINING
from stowage.stages.ir.errors import TraceError
from stowage.stages.trace.step import record_step
from tests.zoo import ZOO, Loss

PRODUCT = "stowage.matmul.default"


def mean(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
    del batch
    return outputs.square().mean()


class Turned(nn.Module):
    """A product of an input that does not lie in order."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(4, 8)

    def forward(self, x: torch.Tensor) -> Any:
        return self.second(self.first(x).transpose(1, 2))


class Left(nn.Module):
    """A product with a weight on its left."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4))

    def forward(self, x: torch.Tensor) -> Any:
        return self.weight @ x


class Pooled(nn.Module):
    """A sum of what does not lie in order, by weights that are learnt."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor) -> Any:
        return x.mT @ self.weight


class Derived(nn.Module):
    """A product with a weight that is computed from two parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.weight_norm(nn.Linear(4, 8))

    def forward(self, x: torch.Tensor) -> Any:
        return self.linear(x.mT)


class Masked(nn.Module):
    """A product with a weight of which some elements are left out."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8))
        self.register_buffer("mask", torch.rand(4, 8) < 0.5)

    def forward(self, x: torch.Tensor) -> Any:
        return x.mT @ self.weight.masked_fill(self.mask, 0.0)


class Biased(nn.Module):
    """Attention with a bias that is learnt, which PyTorch fuses only where it is not."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.bias = nn.Linear(8, 24), nn.Parameter(torch.zeros(4, 4))

    def forward(self, x: torch.Tensor) -> Any:
        q, k, v = self.project(x).unsqueeze(1).chunk(3, dim=-1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.bias)


class Grouped(nn.Module):
    """Such attention of which two queries share keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.bias = nn.Linear(8, 16), nn.Parameter(torch.zeros(4, 4))

    def forward(self, x: torch.Tensor) -> Any:
        q, kv = self.project(x).view(-1, 4, 4, 4).transpose(1, 2).split([2, 2], dim=1)
        return F.scaled_dot_product_attention(q, kv[:, :1], kv[:, 1:], attn_mask=self.bias, enable_gqa=True)


class Asks(nn.Module):
    """Code of a user that asks itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    @property
    def trains(self) -> bool:
        return self.linear.weight.requires_grad


class AsksForWork(Asks):
    def forward(self, x: torch.Tensor) -> Any:
        return self.linear(x) if self.trains else self.linear(x.double().float())


class AsksForANumber(Asks):
    def forward(self, x: torch.Tensor) -> Any:
        return self.linear(x) * (2.0 if self.trains else 1.0)


class AsksForATensor(Asks):
    def forward(self, x: torch.Tensor) -> Any:
        y = self.linear(x)
        return x.exp() + (y if self.trains else x)


class AsksForAModule(Asks):
    def forward(self, x: torch.Tensor) -> Any:
        if self.trains:
            x = self.linear(x)
        return self.linear(x)


class AsksForAMode(Asks):
    """A usual way to freeze a normalisation: its running statistics do not move either."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> Any:
        self.norm.train(self.norm.weight.requires_grad)
        return self.linear(self.norm(x))


class AsksForNothing(Asks):
    """What is made of the answer changes nothing."""

    def forward(self, x: torch.Tensor) -> Any:
        self.kind = "trains" if self.trains else "frozen"
        return self.linear(x)


def turned() -> tuple[nn.Module, torch.Tensor, Loss]:
    return Turned(), torch.randn(2, 4, 8), mean


def said(model: nn.Module, batch: Any, loss: Loss | None) -> list[str]:
    """What freezing adds to the notices."""
    before = {name: p.requires_grad for name, p in model.named_parameters()}
    plain = record_step(model, batch, loss=loss)
    found = record_step(model, batch, loss=loss, freezes=True)
    if not any(call.target in BY_TRAINING for call in found.calls):
        assert (found.calls, found.values) == (plain.calls, plain.values)
    assert {name: p.requires_grad for name, p in model.named_parameters()} == before
    return [notice for notice in found.notices if notice not in plain.notices]


def test_other_kernels_are_told() -> None:
    (notice,) = said(Grouped(), torch.randn(2, 4, 8), mean)
    assert "The forward computes with other kernels in plain PyTorch" in notice


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("model", [Left, Masked, Pooled, Derived, Biased])
def test_kernels_that_depend_on_parameters_are_recorded_as_such(
    model: type[nn.Module], batch: int, dtype: torch.dtype
) -> None:
    made, x = model().to(dtype), torch.randn(batch, 4, 8, dtype=dtype)
    assert said(made, x, mean) == []
    found = record_step(made, x, loss=mean, freezes=True)
    assert any(call.target in BY_TRAINING for call in found.calls)


def test_a_view_that_autograd_makes_anew_is_no_difference() -> None:
    """As that of what is behind a view that is changed in place."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8))
    assert said(model, torch.randn(2, 4, 8), mean) == []


@pytest.mark.parametrize(
    "model", [AsksForWork(), AsksForANumber(), AsksForATensor(), AsksForAModule(), AsksForAMode()], ids=type
)
def test_code_that_computes_something_else_while_frozen_is_refused(model: nn.Module) -> None:
    before = {name: (p.requires_grad, p.clone()) for name, p in model.named_parameters()}
    with pytest.raises(
        TraceError, match=r"depends on whether its parameters train \(.*test_requires_grad.py:\d+ "
    ) as e:
        record_step(model, torch.randn(2, 4, 8), loss=mean, freezes=True)
    assert "train without freeze" in str(e.value)
    for name, p in model.named_parameters():
        assert p.requires_grad == before[name][0]
        assert torch.equal(p, before[name][1])
    record_step(model, torch.randn(2, 4, 8), loss=mean)


def test_code_of_pytorch_that_asks_is_not_refused() -> None:
    """A layer in evaluation is one fused call where nothing requires gradients."""
    model = nn.Sequential(nn.Linear(8, 8), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval())
    said(model, torch.randn(2, 4, 8), mean)


def test_code_that_asks_and_computes_the_same_is_no_matter() -> None:
    assert said(AsksForNothing(), torch.randn(2, 4, 8), mean) == []


@pytest.mark.parametrize(("make", "products"), [(ZOO["transformer"], 8), (ZOO["lstm"], 1), (turned, 1)])
def test_products_take_the_kernels_that_plain_pytorch_does(make: Callable[[], Any], products: int) -> None:
    """They need no notice: the recorded operator does both."""
    model, batch, loss = make()
    assert said(model, batch, loss) == []
    found = record_step(model, batch, loss=loss, freezes=True)
    assert sum(call.target == PRODUCT for call in found.calls) == products
    assert not any("stowage" in call.target for call in record_step(model, batch, loss=loss).calls)


@pytest.mark.parametrize("name", ["gpt2", "gpt2_frozen", "llama", "t5", "vit", "resnet", "in_place", "tied"])
def test_nothing_is_said_of_others(name: str) -> None:
    """What autograd saves, detached or copied, is no difference."""
    assert said(*ZOO[name]()) == []


def test_code_that_needs_gradients_is_left_alone() -> None:
    """A hook on a tensor that does not require gradients is an error, of which nothing is left behind."""

    class Hooked(Turned):
        def forward(self, x: torch.Tensor) -> Any:
            y = super().forward(x)
            y.register_hook(lambda gradient: gradient)
            return y

    assert said(Hooked(), torch.randn(2, 4, 8), mean) == []
    found = record_step(Hooked(), torch.randn(2, 4, 8), loss=mean, freezes=True)
    assert not any(call.target == PRODUCT for call in found.calls), "plain PyTorch cannot run beside it and freeze"


def test_fit_says_it_once(fit_stores: Path) -> None:
    heard: list[str] = []
    model = Grouped()
    step = fit(
        model,
        torch.randn(2, 4, 8),
        torch.optim.SGD(model.parameters(), lr=0.1),
        device_budget="1MiB",
        loss=mean,
        freeze=Freeze(rate=0.5),
        cache_dir=fit_stores,
        quick=True,
        say=heard.append,
    )
    step(torch.randn(2, 4, 8))
    assert sum("computes with other kernels" in text for text in heard) == 1
