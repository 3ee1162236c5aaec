"""`torch.utils.checkpoint` in a model is replaced by the plan; functions whose backward runs modules are traced."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from stowage.flows import fit
from stowage.stages.ir.errors import TraceError
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


class Counting(nn.Module):
    """Its checkpointed block changes a buffer."""

    def __init__(self, block: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.first, self.block, self.last = mlp(), block, mlp()
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.block, self.first(x), use_reentrant=self.reentrant)
        out: torch.Tensor = self.last(x)
        return out


class Momentum(nn.Module):
    """Changes a window of a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bank", torch.zeros(2, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.bank[1].view(2, 4).mul_(0.9).add_(x.detach().mean())  # type: ignore[operator, index]
        return x * self.bank[1]  # type: ignore[index, no-any-return]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(
    ("block", "named"),
    [
        (lambda: nn.BatchNorm1d(8), r"buffer 'block\.(running_mean|num_batches_tracked)'"),
        (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)), r"buffer 'block\.parametrizations\."),
        (Momentum, r"buffer 'block\.bank'"),
    ],
    ids=["batch norm", "spectral norm", "window"],
)
def test_what_plain_pytorch_would_change_twice_is_refused(block: Any, named: str, reentrant: bool) -> None:
    model = Counting(block(), reentrant)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    with pytest.raises(TraceError, match=f"torch.utils.checkpoint changes {named}") as caught:
        fit(model, torch.randn(16, 8), adamw(model), loss=square, device_budget="90%")
    assert "\n" not in str(caught.value)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


def test_what_is_evaluated_under_it_changes_nothing() -> None:
    def make() -> Script:
        made = Counting(nn.BatchNorm1d(8).eval(), False)
        return Script(made, adamw(made), square, rows(3))

    trains_equally(make, "90%")
