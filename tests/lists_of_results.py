"""Operators that return lists beside tensors, as cuDNN's recurrent layers do: with a reserve whose size only the kernel
knows, and gradients of weights that share one buffer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

LIBRARY = torch.library.Library("stowage_tests", "DEF")  # type: ignore[no-untyped-call]
LIBRARY.define("towers(Tensor x, Tensor[] weights) -> (Tensor, Tensor[])")
LIBRARY.define("towers_backward(Tensor gradient, Tensor x, Tensor[] weights, Tensor[] kept) -> (Tensor, Tensor[])")
LIBRARY.define("gated(Tensor x, Tensor[] weights) -> (Tensor, Tensor)")
LIBRARY.define("gated_backward(Tensor gradient, Tensor x, Tensor[] weights, Tensor reserve) -> (Tensor, Tensor[])")
LIBRARY.define("doubled(Tensor x) -> (Tensor, Tensor)")

own: Any = torch.ops.stowage_tests
FORWARD, BACKWARD = "stowage_tests.gated", "stowage_tests.gated_backward"


def towers(x: torch.Tensor, weights: list[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Sum of tanh of products, and the summands."""
    kept = [torch.tanh(x @ w) for w in weights]
    return torch.stack(kept).sum(0), kept


def towers_backward(
    gradient: torch.Tensor, x: torch.Tensor, weights: list[torch.Tensor], kept: list[torch.Tensor]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Gradients of both."""
    inside = [gradient * (1 - k * k) for k in kept]
    return torch.stack([g @ w.t() for g, w in zip(inside, weights)]).sum(0), [x.t() @ g for g in inside]


def gated(x: torch.Tensor, weights: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The same, with all summands in one reserve of bytes."""
    found, kept = towers(x, weights)
    return found, torch.stack(kept).reshape(-1).view(torch.uint8)


def gated_backward(
    gradient: torch.Tensor, x: torch.Tensor, weights: list[torch.Tensor], reserve: torch.Tensor
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The gradients of the weights are views of one buffer."""
    kept = list(reserve.view(x.dtype).view(len(weights), *gradient.shape))
    of_x, of_weights = towers_backward(gradient, x, weights, kept)
    buffer = torch.empty(sum(w.numel() for w in weights), dtype=x.dtype)
    views = list(buffer.view(len(weights), *weights[0].shape))
    for view, made in zip(views, of_weights):
        view.copy_(made)
    return of_x, views


def _like(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in tensors]


def _fake_towers(x: torch.Tensor, weights: list[torch.Tensor]) -> Any:
    made = [x.new_empty((x.shape[0], w.shape[1])) for w in weights]
    return torch.empty_like(made[0]), made


def _fake_backward(gradient: torch.Tensor, x: torch.Tensor, weights: list[torch.Tensor], kept: Any) -> Any:
    return _like(x)[0], _like(*weights)


def _fake_gated(x: torch.Tensor, weights: list[torch.Tensor]) -> Any:
    return x.new_empty((x.shape[0], weights[0].shape[1])), x.new_empty(0, dtype=torch.uint8)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, weights = inputs
    _, kept = output
    ctx.set_materialize_grads(False)
    ctx.many = isinstance(kept, (list, tuple))
    ctx.save_for_backward(x, *weights, *(kept if ctx.many else [kept]))
    ctx.count = len(weights)


def _backward(ctx: Any, gradient: torch.Tensor, _: Any) -> Any:
    x, *others = ctx.saved_tensors
    weights, kept = others[: ctx.count], others[ctx.count :]
    if ctx.many:
        return own.towers_backward.default(gradient, x, weights, kept)
    return own.gated_backward.default(gradient, x, weights, kept[0])


def doubled(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Twice the argument, and something large that the fake kernel says is not there."""
    return x * 2, x.new_ones((64, *x.shape))


for name, kernel, fake in (
    ("towers", towers, _fake_towers),
    ("towers_backward", towers_backward, _fake_backward),
    ("gated", gated, _fake_gated),
    ("gated_backward", gated_backward, _fake_backward),
    ("doubled", doubled, lambda x: (torch.empty_like(x), None)),
):
    LIBRARY.impl(name, kernel, "CPU")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"stowage_tests::{name}", fake, lib=LIBRARY)
for name in ("towers", "gated"):
    torch.library.register_autograd(f"stowage_tests::{name}", _backward, setup_context=_setup, lib=LIBRARY)
torch.library.register_autograd("stowage_tests::doubled", lambda ctx, g, _: g * 2, lib=LIBRARY)


class Towers(nn.Module):
    """Some of its operators return a tensor and a list."""

    def __init__(self, operator: Any, width: int = 8, layers: int = 3) -> None:
        super().__init__()
        self.operator = operator
        self.weights = nn.ModuleList(
            nn.ParameterList(nn.Parameter(torch.randn(width, width) / 4) for _ in range(3)) for _ in range(layers)
        )
        self.inside = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weights in self.weights:
            found, kept = self.operator(x, list(weights))
            x = torch.nn.functional.dropout(self.inside(found), 0.1)
            if isinstance(kept, (list, tuple)):
                x = x + kept[1]
        return x
