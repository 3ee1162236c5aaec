"""Steps that measure how far weights move stay within a tight budget, and take what is predicted."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from stowage.flows import Freeze, TrainingStep, fit
from stowage.stages.ir.freezable import Distance

Make = Callable[[nn.Module], torch.optim.Optimizer]


def square(output: torch.Tensor, _: object = None) -> torch.Tensor:
    return output.float().square().mean()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3)


def measuring(
    model: nn.Module, batch: torch.Tensor, make: Make, budget: str | int, folder: Path, **more: Distance | float
) -> TrainingStep:
    own = copy.deepcopy(model)
    freeze = Freeze(policy="ils", **{"rate": 0.5, **more})  # type: ignore[arg-type]
    return fit(
        own,
        batch,
        make(own),
        device_budget=budget,
        loss=square,
        freeze=freeze,
        check="never",
        cache_dir=folder,
        quick=True,
    )


class Turned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.randn(300, 300).t() / 30) for _ in range(2))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return (batch @ self.first).relu() @ self.second


@pytest.mark.parametrize("distance", ["l1", "relative"])
@pytest.mark.parametrize("kind", ["rows", "turned", "channels_last", "bf16"])
def test_tight_budgets_hold(kind: str, distance: Distance, tmp_path: Path) -> None:
    torch.manual_seed(0)
    batch = torch.randn(8, 300)
    model: nn.Module = nn.Sequential(nn.Linear(300, 300, bias=False), nn.Linear(300, 300, bias=False))
    if kind == "turned":
        model = Turned()
    elif kind == "bf16":
        model, batch = model.bfloat16(), batch.bfloat16()
    elif kind == "channels_last":
        model = nn.Sequential(nn.Conv2d(64, 128, 3, bias=False), nn.Conv2d(128, 64, 3, bias=False))
        model, batch = model.to(memory_format=torch.channels_last), torch.randn(1, 64, 6, 6)  # type: ignore[call-overload]
    predicted = measuring(model, batch, sgd, "300%", tmp_path, distance=distance).plan.device_peak_bytes
    step = measuring(model, batch, sgd, predicted, tmp_path, distance=distance)
    peaks = [step.measure(batch).peak_bytes for _ in range(4)]
    assert max(peaks) <= predicted
    assert max(peaks) >= 0.99 * predicted
