"""One module object under several names trains, and whatever goes wrong, the user's weights stay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.api.beside_plain import WIDTH, Script, adamw, mlp, rows, square, trains_equally


class TwoNames(nn.Module):
    """`self.b = self.a`."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)
        self.b = self.a

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.b(torch.tanh(self.a(x)))
        return out


class SharedLayers(nn.Module):
    """`ModuleList([layer] * 3)`, in a list that is itself under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([mlp()] * 3)
        self.again = self.layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (*self.layers, *self.again):
            x = x + layer(x)
        return x


class Siamese(nn.Module):
    """One encoder called twice, its weight read a third time by a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.ModuleDict({"encoder": mlp()})
        self.right = self.left
        self.head = nn.Linear(32, WIDTH, bias=False)
        self.head.weight = nn.Parameter(torch.randn(WIDTH, 32))
        self.tied = self.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, other = self.left["encoder"](x), self.right["encoder"](x.flip(0))
        return F.cosine_similarity(one, other) + (one @ self.tied.weight).mean(1)


@pytest.mark.exactness
@pytest.mark.parametrize("model", [TwoNames, SharedLayers, Siamese])
def test_trains(model: Any) -> None:
    def make() -> Script:
        made = model()
        return Script(made, adamw(made), square, rows(), seen=lambda: [k for k, _ in made.state_dict().items()])

    trains_equally(make)


class _Fails(TwoNames):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        super().forward(x)
        raise ValueError("after half of the forward")


def test_weights_stay_when_tracing_fails() -> None:
    from stowage.flows import fit
    from stowage.stages.ir.errors import TraceError

    model = _Fails()
    weight, content = model.a.weight, model.a.weight.detach().clone()
    with pytest.raises(TraceError, match="after half of the forward"):
        fit(model, rows(1)[0], adamw(model), device_budget="90%", loss=square, quick=True)
    assert model.a.weight is weight
    assert model.b is model.a
    assert torch.equal(weight, content)
