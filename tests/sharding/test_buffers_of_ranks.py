"""Ranks get the first rank's buffers before the forwards before which DDP does, wherever their elements lie."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from stowage import fit, shard
from stowage.stages.ir.parallel import GroupChoice
from stowage.stages.runtime.sharding.ranks import Ranks
from tests.sharding.beside_ddp import content, differences
from tests.sharding.processes import on_ranks


class Averaged(nn.Module):
    """Reads running means in training: of its own, and of batch normalisation in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 4)
        self.register_buffer("mean", torch.zeros(16))
        self.mean: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        found: torch.Tensor = self.last(self.norm(self.first(x - self.mean)).relu())
        return found


def _loss(outputs: torch.Tensor, _batch: Any) -> torch.Tensor:
    return outputs.square().mean()


def _batch(number: int) -> torch.Tensor:
    rank = dist.get_rank()
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * number + rank)) + rank


def _trained(model: Any, whole: nn.Module, optimizer: torch.optim.Optimizer, together: bool) -> list[Any]:
    """Train, evaluate, and run without gradients in turns."""
    is_sharded = not isinstance(model, DistributedDataParallel)
    found: list[Any] = []
    for number in range(3):
        for last in (False, True) if together else (True,):
            reduced = last or not together
            if is_sharded:
                model.set_requires_gradient_sync(reduced)
            with nullcontext() if reduced or is_sharded else model.no_sync():
                loss = _loss(model(_batch(2 * number + last)), None)
                loss.backward()
            found.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            if number == 1:
                model(_batch(50 + number))
            model.eval()
            found.append(model(_batch(60 + number)).sum().item())
            model.train()
        found.append([b.sum().item() for b in whole.buffers()])
    return found


def _beside_ddp(stores: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for together in (False, True):
        torch.manual_seed(0)
        model = Averaged()
        plain = copy.deepcopy(model)
        optimizer, other = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain))
        shard(
            model,
            _batch(0),
            optimizer,
            device_budget="1GiB",
            loss=_loss,
            accumulate=1 + together,
            choices=lambda groups, *_: [GroupChoice(g.group, False, False) for g in groups],
            cache_dir=stores,
        )
        ours = _trained(model, model, optimizer, together)
        theirs = _trained(DistributedDataParallel(plain), plain, other, together)
        found[f"together {together}"] = (ours == theirs, differences(content(model, optimizer), content(plain, other)))
    return found


def test_buffers_are_those_of_ddp(fit_stores: Path) -> None:
    """Between micro-batches that are reduced together, in evaluation, and after forwards without gradients."""
    for rank in on_ranks(2, _beside_ddp, fit_stores):
        assert rank == {"together False": (True, {}), "together True": (True, {})}


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gaps": lambda base: base[:, :1],
    "rows with gaps": lambda base: base[::2],
    "transposed": lambda base: base.t(),
    "expanded": lambda base: base[:, :1].expand(6, 4),
    "expanded from one": lambda base: base[2, 1].expand(3, 5, 2),
    "windows": lambda base: base.as_strided((5, 3), (2, 1)),
    "a number": lambda base: base[1, 1],
    "nothing": lambda base: base[:0],
}
"""What a buffer may be of a tensor of 6 by 4 numbers."""


def _broadcast() -> dict[str, bool]:
    """Take rank 0's part of a tensor in each layout, and say whether all of the rest stayed."""
    ranks, found = Ranks(dist.group.WORLD), {}
    for name, layout in LAYOUTS.items():
        numbers = torch.arange(24.0).view(6, 4)
        own, expected = numbers + 100 * ranks.rank, numbers + 100 * ranks.rank
        places = layout(torch.arange(24).view(6, 4)).flatten()
        expected.view(-1)[places] = numbers.view(-1)[places]
        ranks.broadcast(layout(own), "a test")
        found[name] = torch.equal(own, expected)
    return found


class Windowed(nn.Module):
    """Multiplies by a column of a larger tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.base = nn.Linear(8, 6), torch.arange(24.0).view(6, 4)
        self.register_buffer("column", self.base[:, :1])
        self.column: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(x) * self.column[:, 0]
        return found


def _windows(stores: Path) -> dict[str, Any]:
    """Fit and shard models whose buffers are windows with gaps, and have other content on rank 1."""
    batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    found: dict[str, Any] = {"layouts": _broadcast()}
    for kind in ("fit", "shard"):
        torch.manual_seed(0)
        model = Windowed()
        model.column.fill_(-dist.get_rank())
        expected = model.base.clone()
        expected[:, 0] = 0.0
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if kind == "fit":
            group = dist.group.WORLD
            fit(model, batch, optimizer, device_budget="1GiB", loss=_loss, quick=True, cache_dir=stores, group=group)(
                batch
            )
        else:
            shard(model, batch, optimizer, device_budget="1GiB", loss=_loss, cache_dir=stores)
            model(batch)
        found[kind] = torch.equal(model.base, expected)
    return found


def test_what_lies_between_the_elements_of_a_buffer_stays(fit_stores: Path) -> None:
    for rank in on_ranks(2, _windows, fit_stores):
        assert rank == {"layouts": dict.fromkeys(LAYOUTS, True), "fit": True, "shard": True}
