"""Ranks whose plan is refused go on together: with leave for codes, too, where all have made parameters whole."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from stowage.flows import Lossy, fit
from stowage.stages.ir.errors import Infeasible
from tests.sharding.processes import on_ranks

WIDTH = 64


def _batch(rows: int, number: int) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(10 * number + dist.get_rank()))


def _loss(outputs: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return (outputs - batch).square().mean()


def _losses(store: Path, more: dict[str, Any], *, refused: bool) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    plan = partial(fit, loss=_loss, cache_dir=store, check="never", quick=True, group=dist.group.WORLD, **more)
    step = plan(model, _batch(8, 0), optimizer, device_budget=500_000)
    losses = [step(_batch(8, 0)).item()]
    if refused:
        with pytest.raises(Infeasible, match="cannot be met"):
            step(_batch(4096, 1))
    return [*losses, *(step(_batch(8, number)).item() for number in (2, 3))]


@pytest.mark.parametrize("more", [{}, {"lossy": Lossy(["bf16"], 0.1)}], ids=["exact", "lossy"])
def test_a_batch_that_does_not_fit_is_refused_and_training_goes_on(fit_stores: Path, more: dict[str, Any]) -> None:
    tried, untried = (on_ranks(2, partial(_losses, refused=refused), fit_stores, more) for refused in (True, False))
    assert tried == untried
