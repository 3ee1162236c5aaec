"""Losses and models that exchange tensors with other ranks are refused at once, by name, and nothing changes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
from torch import nn

from stowage.flows import fit
from stowage.stages.ir.errors import TraceError
from tests.sharding.processes import on_ranks


def _in_place(outputs: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    count = (batch > 0).sum().float()
    dist.all_reduce(count)
    return outputs.square().sum() / count


def _functional(outputs: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    count = functional.all_reduce((batch > 0).sum().float(), "sum", dist.group.WORLD)
    return outputs.square().sum() / count


def _differentiable(outputs: torch.Tensor, _batch: torch.Tensor) -> torch.Tensor:
    everyone = torch.cat(differentiable.all_gather(outputs))
    return torch.logsumexp(outputs @ everyone.t(), 1).mean()


LOSSES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "c10d.allreduce_": _in_place,
    "_c10d_functional.all_reduce": _functional,
    "c10d.allgather_": _differentiable,
}


def _refusals() -> dict[str, tuple[str, bool]]:
    """Return what is said of each loss, and whether the model is as before."""
    found = {}
    for name, loss in LOSSES.items():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        before = copy.deepcopy(model.state_dict())
        optimizer = torch.optim.AdamW(model.parameters())
        batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(dist.get_rank()))
        more: Any = {"loss": loss, "quick": True, "group": dist.group.WORLD}
        try:
            fit(model, batch, optimizer, device_budget="1GiB", **more)
        except TraceError as error:
            same = all(torch.equal(content, before[key]) for key, content in model.state_dict().items())
            found[name] = str(error), same and not optimizer.state
    return found


def test_a_loss_that_exchanges_tensors_is_refused() -> None:
    for found in on_ranks(2, _refusals):
        assert found.keys() == LOSSES.keys()
        for name, (said, same) in found.items():
            assert same, name
            assert "The loss (" in said
            assert "test_exchanging_losses.py:" in said
            assert f"exchanges tensors with other ranks ({name}" in said
            assert "pass what comes of it in the batch" in said
