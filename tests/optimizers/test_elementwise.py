"""Which optimizers update each element by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from stowage.stages.optimizers import why_not_elementwise
from tests.optimizers.kinds import GlobalNorm, Lamb

Make = Callable[[Any], torch.optim.Optimizer]


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(40, 70), nn.LayerNorm(70), nn.Conv1d(70, 3, 2))


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.AdamW(p, lr=1e-2),
        lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True, foreach=True),
        lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
        lambda p: torch.optim.RMSprop(p, lr=1e-2, centered=True),
        lambda p: torch.optim.Adagrad(p, lr=1e-2),
        lambda p: torch.optim.Rprop(p, lr=1e-2),
    ],
)
def test_element_by_element(make: Make) -> None:
    model = layers()
    optimizer = make(model.parameters())
    before = [p.detach().clone() for p in model.parameters()]
    assert why_not_elementwise(optimizer) == ""
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    assert all(float(state.get("step", 0)) == 0 for state in optimizer.state.values())


@pytest.mark.parametrize(
    "make", [lambda p: torch.optim.Adafactor(p, lr=1e-2), lambda p: GlobalNorm(p), lambda p: Lamb(p)]
)
def test_whole_tensors(make: Make) -> None:
    assert "depends on all of the tensor" in why_not_elementwise(make(layers().parameters()))


def test_muon() -> None:
    matrices = [p for p in layers().parameters() if p.ndim == 2]
    assert "2 dimensions" in why_not_elementwise(torch.optim.Muon(matrices, lr=1e-2))
