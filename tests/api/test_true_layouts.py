"""Operators whose real kernels return other strides, or larger storages, than fake ones say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.api.beside_plain import Script, adamw, trains_equally

CHANNELS = 8


class Images(nn.Module):
    """Two convolutions, channels last, with something between them."""

    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor], wider: int = 1) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, CHANNELS * wider, 3, padding=1)
        self.between = between
        self.second = nn.Conv2d(CHANNELS, 3, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(self.between(self.first(x)))
        return result


BETWEEN: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], int]] = {
    "roll": (lambda x: torch.roll(x, (1, 2), (2, 3)) * x, 1),
    "channel_shuffle": (lambda x: F.channel_shuffle(x, 4) * 2, 1),
    "log_softmax": (lambda x: F.log_softmax(x, 1), 1),
    "hardswish": (F.hardswish, 1),
    "elu": (F.elu, 1),
    "glu": (lambda x: F.glu(x, 1), 2),
    "flip": (lambda x: x.flip(-1).exp(), 1),
    "pad": (lambda x: F.pad(x, (1, 1, 1, 1), "replicate")[..., 1:-1, 1:-1], 1),
    "softplus": (lambda x: F.softplus(x.transpose(2, 3)).transpose(2, 3), 1),
    "logsigmoid": (F.logsigmoid, 1),
}
LOSSES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "mse_loss": F.mse_loss,
    "smooth_l1_loss": F.smooth_l1_loss,
    "huber_loss": F.huber_loss,
    "soft_margin_loss": lambda x, y: F.soft_margin_loss(x, y.sign()),
    "binary_cross_entropy": lambda x, y: F.binary_cross_entropy(x.sigmoid(), (y > 0).to(y.dtype)),
}


def images(count: int = 3) -> list[torch.Tensor]:
    return [torch.randn(4, 3, 20, 20).contiguous(memory_format=torch.channels_last) for _ in range(count)]


@pytest.mark.parametrize("name", list(BETWEEN))
def test_channels_last(name: str, fit_stores: Path) -> None:
    def make() -> Script:
        between, wider = BETWEEN[name]
        model = Images(between, wider).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return Script(model, adamw(model), lambda y, _: y.square().mean(), images())

    step = trains_equally(make, "105%", cache_dir=fit_stores, check="never")
    within(step, images(1)[0])


@pytest.mark.parametrize("name", list(LOSSES))
def test_the_number_that_a_loss_returns(name: str, fit_stores: Path) -> None:
    """Of most it keeps the memory of all its parts."""

    def make() -> Script:
        model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32))
        rows = [torch.randn(600, 8) for _ in range(3)]
        target = torch.randn(600, 32)
        return Script(model, adamw(model), lambda y, _: LOSSES[name](y, target), rows)

    step = trains_equally(make, "105%", cache_dir=fit_stores, check="never")
    loss = step.planned.trace.values[step.planned.trace.meta.loss_value]
    x = torch.rand(600, 32)
    assert step.planned.trace.storages[loss.storage].nbytes == LOSSES[name](x, x).untyped_storage().nbytes()
    within(step, torch.randn(600, 8))


def within(step: Any, batch: Any) -> None:
    """A real step takes what the plan says, and no more than the budget."""
    measured = step.measure(batch).peak_bytes
    assert measured <= step.plan.device_peak_bytes <= step.plan.device_budget_bytes
