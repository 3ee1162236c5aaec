"""`torch.utils.checkpoint` in a model is replaced by the plan; functions whose backward runs modules are traced."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.api.beside_plain import Script, adamw, mlp, rows, square, trains_equally


class Checkpointed(nn.Module):
    """Two blocks with dropout."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.second = mlp(), mlp()
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.first, x, use_reentrant=self.reentrant)
        out: torch.Tensor = checkpoint(self.second, x, use_reentrant=self.reentrant)
        return out


class Sequential(nn.Module):
    """A library's helper over it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(mlp(), mlp(), mlp())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint_sequential(self.blocks, 3, x, use_reentrant=False)
        return out


class _Reversible(torch.autograd.Function):
    """y = x + f(x), whose backward runs the block again."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, block: nn.Module, *weights: torch.Tensor) -> torch.Tensor:
        ctx.block, ctx.weights = block, weights
        ctx.save_for_backward(x)
        with torch.no_grad():
            return x + block(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_(True)
            y = x + ctx.block(x)
        found = torch.autograd.grad(y, [x, *ctx.weights], gradients[0])
        return found[0], None, *found[1:]


class Reversible(nn.Module):
    """A stack of such blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([mlp(dropout=0.0), mlp(dropout=0.0)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = _Reversible.apply(x, block, *block.parameters())
        return x


@pytest.mark.exactness
@pytest.mark.parametrize(
    ("model", "budget"),
    [
        (lambda: Checkpointed(False), "85%"),
        (lambda: Checkpointed(True), "85%"),
        (Sequential, "85%"),
        (Reversible, "105%"),  # it keeps next to nothing as it is
    ],
    ids=["checkpoint", "reentrant", "sequential", "reversible"],
)
def test_trains(model: Any, budget: str) -> None:
    def make() -> Script:
        made = model()
        return Script(made, adamw(made), square, rows(requires_grad=True))

    trains_equally(make, budget)


def test_the_reentrant_kind_gives_no_gradient_where_nothing_requires_one() -> None:
    """As in plain PyTorch, which says so in a warning."""

    def make() -> Script:
        class Half(Checkpointed):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.second(checkpoint(self.first, x, use_reentrant=True))  # type: ignore[no-any-return]

        made = Half(True)
        return Script(made, None, square, rows(2))

    trains_equally(make)
