"""Single numbers that lie beside an update, such as norms and what is computed from a rate in a tensor, count too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stowage.flows import fit
from stowage.stages.optimizers import signature_of

Make = Callable[[nn.Module], torch.optim.Optimizer]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def with_tensor(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2))


def square(outputs: torch.Tensor, _: Any) -> torch.Tensor:
    return outputs.square().mean()


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One store, so that an optimizer may find what was measured for another."""
    return tmp_path_factory.mktemp("stores")


@pytest.mark.parametrize(("optimizer", "norm"), [(adamw, None), (with_tensor, None), (adamw, 0.5), (with_tensor, 0.5)])
def test_the_peak_at_an_update(optimizer: Make, norm: float | None, stores: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(128, 128), nn.GELU()) for _ in range(4)])
    batch = torch.randn(4, 128)
    how: dict[str, Any] = {"loss": square, "max_grad_norm": norm, "cache_dir": stores, "quick": True}
    step = fit(model, batch, optimizer(model), device_budget="smallest", say=lambda text: None, **how)
    step(batch)
    peaks = [step.measure(batch).peak_bytes for _ in range(2)]
    assert max(peaks) <= step.plan.device_budget_bytes


def test_a_rate_that_becomes_a_tensor_leads_to_a_new_plan() -> None:
    optimizer = adamw(nn.Linear(2, 2))
    before = signature_of(optimizer)
    optimizer.param_groups[0]["lr"] = torch.tensor(1e-2)
    assert before.differences(signature_of(optimizer), {}) == [
        "lr of group 0 of the optimizer is another kind of value now."
    ]
