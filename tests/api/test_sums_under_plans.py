"""Sums written over a summand, under plans: the same bits, and less memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from stowage.flows import fit
from stowage.stages.ir.errors import Infeasible
from tests.matrix import some
from tests.runtime.beside_eager import same

ROWS, WIDTH, VOCABULARY = 64, 32, 4096
OVER = ".add_("


class Residual(nn.Module):
    """One weight for all layers; a residual whose summands are read again, before and after."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> Any:
        for _ in range(5):
            y = self.drop(torch.tanh(self.shared(x)))
            z = x + y
            x = z + torch.sigmoid(z) + y
        return x


class Tied(nn.Module):
    """The embedding's weight is the head's: two gradients as large as itself are added up."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)

    def forward(self, ids: torch.Tensor) -> Any:
        return F.linear(torch.tanh(self.embed(ids)), self.embed.weight)


def mean_square(outputs: Any, batch: Any) -> Any:
    del batch
    return (outputs**2).mean()


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


@pytest.mark.parametrize("share", some([0.0, 0.5, 1.0], keep=[0.0]))
def test_equal_to_eager(share: float, tmp_path: Path) -> None:
    batch = torch.linspace(-1, 1, ROWS * WIDTH).reshape(ROWS, WIDTH)
    torch.manual_seed(0)
    model = Residual()
    eager = Residual()
    eager.load_state_dict(model.state_dict())
    common: dict[str, Any] = {"loss": mean_square, "quick": True, "cache_dir": tmp_path}
    with pytest.raises(Infeasible) as found:
        fit(model, batch, adamw, device_budget=1, **common)
    least = found.value.smallest_feasible_bytes
    whole = fit(model, batch, adamw, device_budget="200%", **common).plan.device_peak_bytes
    step = fit(model, batch, adamw, device_budget=least + int(share * (whole - least)), **common)
    assert step.planned.source.count(OVER) >= 5

    optimizer = adamw(eager.parameters())
    torch.manual_seed(1)
    expected = []
    for _ in range(4):
        optimizer.zero_grad()
        value = mean_square(eager(batch), batch)
        value.backward()
        optimizer.step()
        expected.append(value.item())
    torch.manual_seed(1)
    losses = [step(batch).item() for _ in range(3)]
    measured = step.measure(batch)
    assert [*losses, measured.loss] == expected
    assert same(dict(eager.named_parameters()), dict(model.named_parameters()))
    assert measured.peak_bytes == step.plan.device_peak_bytes


def test_two_gradients_of_a_tied_weight_are_two(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Tied()
    step = fit(model, torch.arange(8), None, device_budget="200%", loss=mean_square, quick=True, cache_dir=tmp_path)
    weight = VOCABULARY * WIDTH * 4
    assert 3 * weight < step.plan.device_peak_bytes < 3.5 * weight, "weight and two gradients"
    measured = step.measure(torch.arange(8))
    assert measured.peak_bytes == step.plan.device_peak_bytes
    assert OVER in step.planned.source
    assert model.embed.weight.grad is not None
    eager = Tied()
    eager.load_state_dict(model.state_dict())
    mean_square(eager(torch.arange(8)), None).backward()
    assert same(eager.embed.weight.grad, model.embed.weight.grad)


def test_what_moves_between_device_and_disk(tmp_path: Path) -> None:
    """A summand that a copy may still be reading is left alone."""
    torch.manual_seed(0)
    model = Residual()
    eager = Residual()
    eager.load_state_dict(model.state_dict())
    batch = torch.linspace(-1, 1, 64 * ROWS * WIDTH).reshape(-1, WIDTH)
    common: dict[str, Any] = {"loss": mean_square, "quick": True, "cache_dir": tmp_path / "plans"}
    common |= {"method": "offmate", "offload_dir": tmp_path / "disk"}
    with pytest.raises(Infeasible) as found:
        fit(model, batch, None, device_budget=1, **common)
    step = fit(model, batch, None, device_budget=found.value.smallest_feasible_bytes, **common)
    assert step.plan.offload_bytes > 0
    torch.manual_seed(1)
    expected = mean_square(eager(batch), batch)
    expected.backward()
    torch.manual_seed(1)
    measured = step.measure(batch)
    assert measured.loss == expected.item()
    assert measured.peak_bytes <= step.plan.device_peak_bytes
    gradients = {n: p.grad for n, p in eager.named_parameters()}
    assert same(gradients, {n: p.grad for n, p in model.named_parameters()})
