"""Ranks whose step cannot be made keep their models and optimizers whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from stowage.flows import TrainingStep, fit
from stowage.stages.ir.errors import Infeasible, StowageError
from stowage.stages.runtime.executors import single
from tests.sharding.processes import on_ranks


def _model() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)  # it has states from the start
    return model, optimizer


def _mean(outputs: torch.Tensor, _batch: Any) -> torch.Tensor:
    return outputs.square().mean()


def _fit(stores: Path, model: nn.Module, optimizer: torch.optim.Optimizer, **changed: Any) -> TrainingStep:
    given: dict[str, Any] = {"device_budget": "1GiB", "loss": _mean, "group": dist.group.WORLD, "cache_dir": stores}
    given |= {"quick": True, "say": lambda text: None, **changed}
    return fit(model, torch.ones(4, 5), optimizer, **given)


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [*model.state_dict().values(), *(s for states in optimizer.state.values() for s in states.values())]


def _refused(stores: Path, case: str) -> tuple[str, bool]:
    """What fit says, and whether everything is as it was."""
    model, optimizer = _model()
    before = [t.clone() for t in _tensors(model, optimizer)]
    given: dict[str, Any] = {}
    if case == "head":
        head = nn.Linear(3, 2)
        optimizer.add_param_group({"params": list(head.parameters())})
        before = [t.clone() for t in _tensors(model, optimizer)]
        given["loss"] = lambda outputs, batch: head(outputs).mean()
    bind, calls = single.bind, []

    def failing(*arguments: Any, **keywords: Any) -> Any:
        calls.append(case)
        if case == "alone" and dist.get_rank() == 1:
            raise OSError("no room on this rank")
        if case == "later" and len(calls) == 2:
            raise Infeasible(1, 2, "forward", [])
        return bind(*arguments, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(single, "bind", failing)
        with pytest.raises((StowageError, OSError)) as refusal:
            _fit(stores, model, optimizer, accumulate=2 if case == "later" else 1, **given)
    after = _tensors(model, optimizer)
    same = all(map(torch.equal, before, after)) and len(before) == len(after)
    exact = all(t.untyped_storage().nbytes() == t.nbytes for t in after)
    if case != "head":
        _fit(stores, model, optimizer)(torch.ones(4, 5))
    return str(refusal.value), same and exact


def _all(stores: Path) -> dict[str, tuple[str, bool]]:
    return {case: _refused(stores, case) for case in ("head", "alone", "later")}


def test_a_step_that_cannot_be_made_leaves_all_whole(fit_stores: Path) -> None:
    first, second = on_ranks(2, _all, fit_stores)
    for said in (first, second):
        assert "of shape (2, 3) gets a gradient and is no part of the model" in said["head"][0]
        assert all(whole for _, whole in said.values())
    assert first["alone"][0] == "Rank 1 failed: OSError: no room on this rank"
    assert "no room" in second["alone"][0]
