"""What ranks cannot train together is refused in one sentence, and model and optimizer stay as they were."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from stowage import fit, shard
from stowage.stages.ir.errors import ParameterError
from stowage.stages.ir.parallel import GroupChoice
from tests.sharding.processes import on_ranks


def _mean(outputs: torch.Tensor, _batch: Any) -> torch.Tensor:
    return outputs.square().mean()


def _made() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)), torch.randn(8, 16)


def _stepped_by_rprop(stores: Path) -> str:
    model, batch = _made()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.Rprop(model.parameters(), lr=1e-3)
    with pytest.raises(ParameterError) as refusal:
        shard(
            model,
            batch,
            optimizer,
            device_budget="1GiB",
            loss=_mean,
            choices=lambda groups, *_: [GroupChoice(g.group, False, False) for g in groups],
            cache_dir=stores,
        )
    assert all(type(p) is nn.Parameter and torch.equal(p, before[name]) for name, p in model.named_parameters())
    _mean(model(batch), batch).backward()
    optimizer.step()
    return str(refusal.value)


def test_an_optimizer_that_cannot_step_shards(fit_stores: Path) -> None:
    """Rprop goes element by element, but not with the tensors that FSDP2 makes."""
    for text in on_ranks(2, _stepped_by_rprop, fit_stores):
        assert text.startswith("Rprop cannot step the shards that fully_shard makes (RuntimeError: aten."), text
        assert text.endswith("take another optimizer, such as AdamW, SGD or Lion, or train with fit and group.")


def _outside_of_the_group(stores: Path) -> list[str]:
    group = dist.new_group([1])
    said: list[str] = []
    for one in (group, "world") if dist.get_rank() == 0 else ():
        for work in (partial(fit, quick=True), shard):
            model, batch = _made()
            optimizer = torch.optim.AdamW(model.parameters())
            given: Any = {"device_budget": "1GiB", "loss": _mean, "group": one, "cache_dir": stores}
            with pytest.raises(ParameterError) as refusal:
                work(model, batch, optimizer, **given)
            said.append(str(refusal.value))
    dist.barrier()
    return said


def test_a_process_that_is_not_in_the_group(fit_stores: Path) -> None:
    outside, none = on_ranks(2, _outside_of_the_group, fit_stores)
    assert none == []
    assert [text.split(":")[0] for text in outside] == [
        *["This process is not in group"] * 2,
        *["group is 'world', which is no process group"] * 2,
    ]
