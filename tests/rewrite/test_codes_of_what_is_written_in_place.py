"""Values that forward writes into in place, be it through a view, are packed as backward reads them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stowage.stages.rewrite import REWRITES, rewritten
from stowage.stages.sensitivity import StepTensors, run_trace
from stowage.stages.trace import trace_step

LIMIT = 0.02
"""More than these codes cost here: wrong values cost tenths."""


def transposed(h: torch.Tensor) -> torch.Tensor:
    g = h.t().sigmoid_()
    return g * g


def cloned_before(h: torch.Tensor) -> torch.Tensor:
    before = h.clone()
    h.mul_(3)
    return before * before + h * h


def computed_before(h: torch.Tensor) -> torch.Tensor:
    before = (h + 1).tanh()
    h.add_(2)
    return before * before * h * h


def half(h: torch.Tensor) -> torch.Tensor:
    h[:, :32].sigmoid_()
    return (h[:, :32] * h[:, 32:]).repeat(1, 2)


def rectified(h: torch.Tensor) -> torch.Tensor:
    g = h.unflatten(-1, (8, 8)).transpose(1, 2).relu_()
    return (g * g).flatten(1)


def twice(h: torch.Tensor) -> torch.Tensor:
    h.view(-1).mul_(2)
    return F.relu(h.t().add_(1)).t().exp()


class Written(nn.Module):
    """Two layers, with something in place between them."""

    def __init__(self, between: Any) -> None:
        super().__init__()
        self.first, self.last, self._between = nn.Linear(64, 64), nn.Linear(64, 64), between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(self._between(self.first(x)))
        return found


class Gated(nn.Module):
    """A cell whose gates are written in place, in pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.cell(x[:, :32], self.cell(x[:, 32:]))
        return found


MODELS: dict[str, Any] = {
    **{
        between.__name__: lambda between=between: Written(between)
        for between in (transposed, cloned_before, computed_before, half, rectified, twice)
    },
    "gated": Gated,
}


def gradients(trace: Any, model: nn.Module, batch: torch.Tensor) -> dict[str, torch.Tensor]:
    return run_trace(trace, StepTensors.of(model, (batch,)))[1]


@pytest.mark.parametrize("name", MODELS)
def test_codes_cost_what_codes_cost(name: str) -> None:
    torch.manual_seed(0)
    model, batch = MODELS[name](), torch.randn(64, 64)
    trace = trace_step(model, (batch,), loss=lambda out, _: out.square().mean())
    plain = gradients(trace, model, batch)
    packed = 0
    for kind in ("bf16", "int8", "relu1bit"):
        for site in range(len(REWRITES[kind].sites(trace))):
            packed += 1
            found = gradients(rewritten(trace, f"{kind}[{site}]"), model, batch)
            for parameter, expected in plain.items():
                error = float((found[parameter] - expected).norm() / expected.norm())
                assert error <= (0 if kind == "relu1bit" else LIMIT), (kind, site, parameter)
    assert packed > 0
