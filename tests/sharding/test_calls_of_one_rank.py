"""What all ranks have to call together, and one of them calls alone, is named on all of them; training goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from stowage.flows import TrainingStep, fit
from stowage.stages.ir.errors import RankError
from tests.sharding.processes import on_ranks


def _lent(step: TrainingStep) -> None:
    with step.on_device():
        pass


def _trained(step: TrainingStep, _folder: Path) -> None:
    step(torch.ones(4, 5))


CALLS: dict[str, Callable[[TrainingStep, Path], Any]] = {
    "save": lambda step, folder: step.save(folder / "checkpoint"),
    "save_model": lambda step, folder: step.save_model(folder / "weights.safetensors"),
    "on_device": lambda step, folder: _lent(step),
    "contents": lambda step, folder: step.contents(),
    "evaluate": lambda step, folder: step.evaluate(torch.ones(4, 5)),
}


def _mean(outputs: torch.Tensor, _batch: Any) -> torch.Tensor:
    return outputs.square().mean()


def _alone(stores: Path, folder: Path) -> dict[str, str]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    step = fit(
        model, torch.ones(4, 5), torch.optim.AdamW(model.parameters()), device_budget="1GiB", loss=_mean, quick=True,
        group=dist.group.WORLD, cache_dir=stores, say=lambda text: None,
    )  # fmt: skip
    said = {}
    for name, call in CALLS.items():
        own = call if dist.get_rank() == 0 else _trained
        with pytest.raises(RankError) as refusal:
            own(step, folder)
        said[name] = str(refusal.value)
        step(torch.ones(4, 5))
    CALLS["save"](step, folder)
    return said


def test_one_rank_alone(fit_stores: Path, tmp_path: Path) -> None:
    for said in on_ranks(2, _alone, fit_stores, tmp_path):
        for name, text in said.items():
            assert text.startswith(f"Rank 1 calls step(batch) while rank 0 calls step.{name}: let all ranks"), text
