"""Optimizers are tried on shards of tensors that lie in memory as the parameters do."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

from stowage.stages.ir.collectives import ShardForm
from stowage.stages.optimizers import on_shards


class MatricesDecay(torch.optim.Optimizer):
    """Descends, and lets matrices decay."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                if parameter.dim() > 1:
                    parameter.mul_(0.9)
                parameter.sub_(parameter.grad, alpha=self.param_groups[0]["lr"])


def _transposed() -> torch.Tensor:
    return torch.randn(8, 6).t()


def _channels_last() -> torch.Tensor:
    return torch.randn(8, 3, 3, 3).to(memory_format=torch.channels_last)


def _one_row() -> torch.Tensor:
    return torch.randn(8, 1).t()


def test_dimensions_that_shards_lose_are_missed() -> None:
    plain = [nn.Parameter(torch.randn(size, 6)) for size in (4, 6, 8)]
    assert not on_shards(MatricesDecay(plain)).differs
    found = on_shards(MatricesDecay([*plain, nn.Parameter(_transposed())])).differs
    assert "shape (6, 8) lies in memory with strides (1, 6)" in found
    assert "make it contiguous" in found


@pytest.mark.parametrize("make", [_channels_last, _one_row])
def test_shards_of_rows_keep_their_dimensions(make: Callable[[], torch.Tensor]) -> None:
    tensor = make()
    form = ShardForm.of(tensor.shape, tensor.stride(), 2)
    assert form is not None
    assert len(form.shape) == tensor.dim()
    assert not on_shards(MatricesDecay([nn.Parameter(tensor)])).differs


@pytest.mark.parametrize("make", [_transposed, _channels_last, _one_row, lambda: torch.randn(3, 4, 5).permute(2, 0, 1)])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad])
def test_what_goes_by_elements_goes_by_shards_of_any_layout(make: Any, kind: Any) -> None:
    assert not on_shards(kind([nn.Parameter(make())])).differs
