"""Batches and models whose tensors share memory: each is still itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from stowage.stages.workload.randomness import seeded
from tests.runtime.beside_eager import assert_equal_training, prepare
from tests.zoo import Entry


class Language(nn.Module):
    """Next-token prediction over eight tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer, self.head = nn.Embedding(8, 6), nn.Linear(6, 6), nn.Linear(6, 8)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> Any:
        logits = self.head(torch.tanh(self.layer(self.embed(ids))))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def shifted() -> dict[str, torch.Tensor]:
    """Inputs and labels are windows on one tensor, as data loaders make them."""
    tokens = torch.randint(0, 8, (2, 7))
    return {"ids": tokens[:, :-1], "labels": tokens[:, 1:]}


def labels_are_inputs() -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, 8, (2, 7))
    return {"ids": tokens, "labels": tokens}


@pytest.mark.parametrize("make", [shifted, labels_are_inputs])
def test_batches(make: Callable[[], dict[str, torch.Tensor]]) -> None:
    def build() -> Entry:
        with seeded(0):
            return Language(), make(), lambda outputs, batch: outputs

    prepared = prepare(build)
    assert_equal_training(build, prepared, prepared.smallest())


def test_names_of_a_nested_batch_do_not_collide() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, **parts: Any) -> Any:
            return self.layer(parts["a"][0] - parts["a0"] * 2 + parts["a.0"] * 3 - parts["a"][1] * 5).sum()

    def build() -> Entry:
        with seeded(0):
            batch = {"a": [torch.randn(3), torch.randn(3)], "a0": torch.randn(3), "a.0": torch.randn(3)}
            return Sum(), batch, lambda outputs, _: outputs

    prepared = prepare(build)
    assert_equal_training(build, prepared, prepared.smallest())


class Flat(nn.Module):
    """Parameters that are windows on one tensor, as `vector_to_parameters` leaves them; a buffer sees them too."""

    def __init__(self) -> None:
        super().__init__()
        whole = torch.randn(3, 4, 4)
        self.one, self.two = nn.Parameter(whole[0]), nn.Parameter(whole[1])
        self.register_buffer("three", whole[2])
        self.three: torch.Tensor

    def forward(self, x: torch.Tensor) -> Any:
        return torch.tanh(torch.tanh(torch.tanh(x @ self.one) @ self.three) @ self.two) @ self.one


def test_parameters_of_one_tensor() -> None:
    def build() -> Entry:
        with seeded(0):
            return Flat(), {"x": torch.randn(5, 4)}, lambda outputs, _: outputs.pow(2).mean()

    prepared = prepare(build)
    for solved in (prepared.smallest(), prepared.solve()):
        assert_equal_training(build, prepared, solved)
