"""Steps that measure how far weights move stay within a tight budget, and take what is predicted."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from stowage.flows import Freeze, TrainingStep, fit
from stowage.stages.freezing.stored import check_plan
from stowage.stages.ir.errors import MIB
from stowage.stages.ir.freezable import Distance
from tests.freezing.beside import units_in
from tests.optimizers.kinds import Counting, GlobalNorm

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


@pytest.mark.parametrize("kind", [Counting, GlobalNorm])
def test_one_update_of_all_copies_what_trains(kind: Callable[..., torch.optim.Optimizer], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(10)))
    batch = torch.randn(8, 256)

    def make(own: nn.Module) -> torch.optim.Optimizer:
        return kind(own.parameters())

    step = measuring(model, batch, make, "300%", tmp_path, rate=0.9)
    for _ in range(10):
        step(batch)
    peak, predicted = max(step.measure(batch).peak_bytes for _ in range(4)), step.plan.device_peak_bytes
    assert peak <= predicted
    assert predicted - peak <= max(0.02 * peak, MIB / 16)
    assert step.plan.all_active_bytes - predicted > 8 * 256 * 256 * 4
    tight = measuring(model, batch, make, predicted, tmp_path, rate=0.9)
    found = tight.planned
    assert found is not None
    check_plan(found.trace, found.nodes, found.rows, found.slots, found.summary, units_in(tight))
