"""Batches of any class train as in plain PyTorch, bit for bit, each with its own content."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from transformers import BatchEncoding

from stowage.flows import fit
from tests.api.live_steps import Beside


@dataclass
class Sample:
    x: Tensor
    y: Tensor
    name: str = ""


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


class Slots:
    __slots__ = ("x", "y")

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y


class Lazy(dict[str, Tensor]):
    """A mapping with something beside its items."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        super().__init__(x=x)
        self.target = y


class Network(nn.Module):
    """Takes what `pick` finds in its batch."""

    def __init__(self, pick: Callable[..., tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 4))
        self.pick = pick

    def forward(self, *batch: Any, **named: Any) -> Tensor:
        x, y = self.pick(*batch, **named)
        return (self.body(x) - y).pow(2).mean()


def named(x: Tensor, y: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    return x, y


CASES: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[..., tuple[Tensor, Tensor]]]] = {
    "UserDict": (lambda x, y: UserDict(x=x, y=y), named),
    "BatchEncoding": (lambda x, y: BatchEncoding({"x": x, "y": y}), named),
    "in a list": (lambda x, y: [UserDict(x=x), {"deep": BatchEncoding({"y": y})}],
                  lambda one, two: (one["x"], two["deep"].y)),
    "dict subclass": (Lazy, lambda x: (x, x.new_zeros(64, 4))),
    "dict subclass within": (lambda x, y: {"given": Lazy(x, y)}, lambda given: (given["x"], given.target)),
    "dataclass": (Sample, lambda batch: (batch.x, batch.y)),
    "named tuple": (Pair, named),
    "named tuple within": (lambda x, y: (Pair(x, y),), lambda pair: (pair.x, pair.y)),
    "object": (lambda x, y: SimpleNamespace(x=x, deep=SimpleNamespace(y=y)), lambda batch: (batch.x, batch.deep.y)),
    "slots": (Slots, lambda batch: (batch.x, batch.y)),
    "the same twice": (lambda x, y: SimpleNamespace(x=x, again=[x], y=y), lambda batch: (batch.again[0], batch.y)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_every_batch_has_its_own_content(name: str, fit_stores: Path) -> None:
    make, pick = CASES[name]
    beside = Beside(lambda: Network(pick))
    batches = [make(torch.randn(64, 8), torch.randn(64, 4)) for _ in range(4)]
    step = fit(beside.ours, batches[0], beside.optimizer, device_budget="85%", cache_dir=fit_stores, quick=True)
    for batch in batches:
        beside.equal(lambda: step(batch), lambda: beside.eager_loss(batch))  # noqa: B023
    assert beside.plans(step) == 1
