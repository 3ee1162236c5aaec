"""A model whose activations outweigh its weights, and steps of it beside plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from stowage.flows import TrainingStep
from stowage.stages.optimizers.content import leaves_of, same_leaf
from tests.configurations.alongside import Plain

Batch = tuple[torch.Tensor]


class Mixed(nn.Module):
    """Matrices and vectors, dropout on, and a parameter that no loss depends on."""

    def __init__(self, layers: int = 3, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(0.2), nn.Linear(2 * width, width))
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.unused = nn.Parameter(torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.norm(x)


def small_model() -> Mixed:
    """The same weights each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return Mixed()


def small_batches(count: int, rows: int = 128, width: int = 16) -> list[Batch]:
    """Different ones, of growing scale."""
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(rows, width, generator=generator) * (1 + i),) for i in range(count)]


def square(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
    """A loss with large gradients."""
    return (outputs - batch[0]).pow(2).mean() * 10


def beside(model: nn.Module, optimizer: torch.optim.Optimizer, **more: Any) -> Plain:
    """Plain PyTorch."""
    return Plain(model, optimizer, loss=square, **more)


def held(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
    """Parameters, their gradients and everything that the optimizer holds, by name."""
    names = {id(p): n for n, p in model.named_parameters()}
    content = {n: p.detach() for n, p in model.named_parameters()}
    content |= {f"{n}.grad": p.grad for n, p in model.named_parameters()}
    own = {k: v for k, v in vars(optimizer).items() if k not in ("step", "defaults", "_opt_called") and "hook" not in k}
    found = leaves_of(own, names)
    return {(name,): value for name, value in content.items()} | found


def assert_trains_alike(
    step: TrainingStep,
    plain: Plain,
    given: Sequence[Batch],
    updates: Sequence[bool],
    after: Callable[[int], None] = lambda number: None,
) -> None:
    """Losses, norms, random numbers, weights, gradients, states and counters, after every micro-batch."""
    assert step.optimizer is not None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        for number, (batch, update) in enumerate(zip(given, updates, strict=True)):
            state = torch.get_rng_state()
            expected = plain(batch, update=update)
            drawn = torch.get_rng_state()
            torch.set_rng_state(state)
            found = step(batch, update=update)
            assert torch.equal(found, expected), f"loss {number}: {found}, {expected}"
            assert torch.equal(torch.get_rng_state(), drawn), f"random state {number}"
            mine, theirs = held(step.model, step.optimizer), held(plain.model, plain.optimizer)
            assert mine.keys() == theirs.keys()
            assert [path for path in mine if not same_leaf(mine[path], theirs[path])] == [], f"micro-batch {number}"
            after(number)
