"""Ranks go on as DistributedDataParallel does where a model has other parameters than when it was dealt out."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from stowage.flows import TrainingStep, fit
from stowage.stages.ir.errors import StowageError
from tests.sharding.processes import on_ranks


def _made() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def _mean(outputs: torch.Tensor, _batch: Any = None) -> torch.Tensor:
    return outputs.square().mean()


def _batch(number: int) -> torch.Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * number + dist.get_rank()))


def _fit(stores: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> TrainingStep:
    return fit(
        model, _batch(0), optimizer, device_budget="1GiB", loss=_mean, group=dist.group.WORLD, cache_dir=stores,
        quick=True, say=lambda text: None,
    )  # fmt: skip


def _head(model: nn.Sequential) -> nn.Module:
    model[2] = nn.Linear(7, 2)
    return model[2]


def _further(model: nn.Sequential) -> nn.Module:
    model.insert(2, nn.Linear(7, 7))  # what comes after it has another name now
    return model[2]


def _changed(model: nn.Sequential, optimizer: torch.optim.Optimizer, kind: str) -> None:
    torch.manual_seed(5)
    made = {"head": _head, "further": _further}[kind](model)
    optimizer.add_param_group({"params": list(made.parameters())})


def _trains_on(stores: Path, kind: str) -> bool:
    model, optimizer = _made()
    plain = copy.deepcopy(model)
    other = torch.optim.AdamW(plain.parameters(), lr=0.01)
    step, ddp = _fit(stores, model, optimizer), nn.parallel.DistributedDataParallel(plain)
    old = model[2]
    for i in range(4):
        if i == 2:
            _changed(model, optimizer, kind)
            _changed(plain, other, kind)
            ddp = nn.parallel.DistributedDataParallel(plain)
        loss = _mean(ddp(_batch(i)))
        loss.backward()
        other.step()
        other.zero_grad()
        assert torch.equal(step(_batch(i)), loss.detach())
    if kind == "head":  # the user's own again
        assert old.state_dict()["weight"].shape == optimizer.state[old.weight]["exp_avg"].shape == (3, 7)
    with step.on_device():
        return all(torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters(), strict=True))


def _refused(stores: Path) -> list[str]:
    said = []
    for alone in (True, False):
        model, optimizer = _made()
        step = _fit(stores, model, optimizer)
        if not alone or dist.get_rank() == 1:
            model[2].weight = nn.Parameter(torch.ones(3, 7))  # which the optimizer does not hold
        with pytest.raises(StowageError) as refusal:
            step(_batch(1))
        said.append(str(refusal.value))
    return said


def _all(stores: Path) -> tuple[list[bool], list[str]]:
    return [_trains_on(stores, kind) for kind in ("head", "further")], _refused(stores)


def test_new_parameters_are_cut_and_old_ones_given_back(fit_stores: Path) -> None:
    for equal, said in on_ranks(2, _all, fit_stores):
        assert equal == [True, True]
        assert said[0].startswith("Rank 1 has another plan than rank 0")
        assert "'2.weight' gets a gradient, but the optimizer does not hold it" in said[1]
