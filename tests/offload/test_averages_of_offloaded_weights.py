"""A moving average of weights, made as README says, while they are offloaded."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stowage.flows import fit
from stowage.stages.ir.errors import Infeasible
from stowage.stages.workload.randomness import seeded


def network() -> nn.Module:
    """Weights outweigh what the disk tier needs for itself."""
    with seeded(0):
        return nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.Tanh()) for _ in range(6)))


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def test_lent_one_by_one(fit_stores: Path, tmp_path: Path) -> None:
    model, other, batch = network(), network(), torch.randn(8, 512)
    how: dict[str, Any] = {
        "loss": lambda outputs, batch: outputs.pow(2).mean(),
        "method": "offmate",
        "offload_dir": tmp_path,
        "cache_dir": fit_stores,
        "quick": True,
        "check": "never",
        "say": lambda text: None,
    }
    with pytest.raises(Infeasible) as caught:
        fit(model, batch, adamw, device_budget=1, **how)
    step = fit(model, batch, adamw, device_budget=caught.value.smallest_feasible_bytes * 11 // 10, **how)
    optimizer, average, expected = adamw(other.parameters()), copy.deepcopy(other), copy.deepcopy(other)
    for _ in range(3):
        step(batch)
        other(batch).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert step.programs.offloading is not None
        assert step.programs.offloading.offloaded_parameters()
        with torch.no_grad():
            contents = step.contents()
            for mean, weight in zip(average.parameters(), model.parameters(), strict=True):
                contents.lend(weight, lambda there, mean=mean: mean.lerp_(there, 0.1))  # type: ignore[misc]
            for mean, weight in zip(expected.parameters(), other.parameters(), strict=True):
                mean.lerp_(weight, 0.1)
        assert all(map(torch.equal, average.parameters(), expected.parameters()))
