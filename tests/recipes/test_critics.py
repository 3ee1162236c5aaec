"""A critic whose loss holds a gradient of itself: WGAN-GP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.api.beside_plain import Script, trains_equally

NOISE, WIDTH, ROWS = 6, 8, 64


def _generator() -> nn.Module:
    return nn.Sequential(nn.Linear(NOISE, 16), nn.ReLU(), nn.Linear(16, WIDTH))


def _critic(kind: str) -> nn.Module:
    if kind == "layers":
        return nn.Sequential(
            nn.Linear(WIDTH, 32), nn.LeakyReLU(0.2), nn.Linear(32, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 1)
        )
    return nn.Sequential(
        nn.Unflatten(1, (2, 2, 2)),
        nn.Conv2d(2, 8, 3, padding=1),
        nn.InstanceNorm2d(8, affine=True),
        nn.SiLU(),
        nn.Flatten(),
        nn.Linear(32, 1),
    )


def penalty(critic: nn.Module, real: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    """How far the norm of the critic's gradient is from one, between real ones and made ones."""
    share = torch.rand(len(real), 1)
    between = (share * real + (1 - share) * made).requires_grad_(True)
    scores = critic(between)
    (gradient,) = torch.autograd.grad(
        scores, between, grad_outputs=torch.ones_like(scores), create_graph=True, retain_graph=True, only_inputs=True
    )
    return ((gradient.view(len(real), -1).norm(2, dim=1) - 1) ** 2).mean()


@pytest.mark.long
@pytest.mark.parametrize("kind", ["layers", "convolutions"])
def test_the_critic(kind: str, fit_stores: Path) -> None:
    def make() -> Script:
        critic, generator = _critic(kind), _generator()

        def loss(scores: torch.Tensor, batch: Any) -> torch.Tensor:
            real = batch[0]
            made = generator(torch.randn(len(real), NOISE)).detach()
            value: torch.Tensor = critic(made).mean() - scores.mean() + 10 * penalty(critic, real, made)
            return value

        optimizer = torch.optim.AdamW(critic.parameters(), lr=1e-3, betas=(0.0, 0.9))
        return Script(critic, optimizer, loss, [(torch.randn(ROWS, WIDTH),) for _ in range(4)])

    trains_equally(make, "90%", cache_dir=fit_stores)


def test_the_generator(fit_stores: Path) -> None:
    def make() -> Script:
        critic, generator = _critic("layers").requires_grad_(False), _generator()

        def loss(made: torch.Tensor, _: Any) -> torch.Tensor:
            value: torch.Tensor = -critic(made).mean()
            return value

        optimizer = torch.optim.AdamW(generator.parameters(), lr=1e-3)
        return Script(generator, optimizer, loss, [(torch.randn(ROWS, NOISE),) for _ in range(4)])

    trains_equally(make, "90%", cache_dir=fit_stores)
