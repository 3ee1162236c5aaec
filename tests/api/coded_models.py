"""Small networks with values of every sort that codes are for; dropout on, in training mode, and built anew each time.

`CODED[name]()` returns a model and its batch; the model returns its loss. Activations outweigh weights by far.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional as F

ROWS, WIDTH, BLOCKS = 256, 96, 3
CHANNELS, SIDE = 16, 16

Coded = tuple[nn.Module, torch.Tensor]


class Dense(nn.Module):
    """Residual blocks: a layer normalisation, a linear layer, an activation function and dropout."""

    def __init__(self, activation: Callable[[torch.Tensor], torch.Tensor], *, frozen: bool = False) -> None:
        super().__init__()
        self.activation = activation
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(BLOCKS))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))
        self.dropout = nn.Dropout(0.1)
        if frozen:
            self.norms.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + self.dropout(self.activation(layer(norm(x))))
        return x.square().mean()


class Gated(nn.Module):
    """One branch is multiplied by a softmax of another, and the next by a sigmoid."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2 * BLOCKS))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2 * BLOCKS))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, (gate, layer) in enumerate(zip(self.gates, self.layers, strict=True)):
            weights = torch.sigmoid(4 * gate(x)) if number % 2 else torch.softmax(4 * gate(x), -1)
            x = x + self.dropout(weights * layer(x))
        return x.square().mean()


class Convolutions(nn.Module):
    """Convolutions with batch normalisations, whose running statistics change once an iteration."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (3, *[CHANNELS] * BLOCKS)
        self.convolutions = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1, bias=False) for a, b in pairwise(sizes))
        self.norms = nn.ModuleList(nn.BatchNorm2d(CHANNELS) for _ in range(BLOCKS))
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(CHANNELS, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = self.dropout(torch.tanh(norm(convolution(x))))
        return F.cross_entropy(self.head(x.mean((2, 3))), torch.arange(len(x)) % 4)


def _built(build: Callable[[], nn.Module], *shape: int) -> Callable[[], Coded]:
    def make() -> Coded:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return build().train(), torch.randn(*shape)

    return make


CODED: dict[str, Callable[[], Coded]] = {
    "linear": _built(lambda: Dense(torch.tanh), ROWS, WIDTH),
    "relu": _built(lambda: Dense(F.relu), ROWS, WIDTH),
    "gelu": _built(lambda: Dense(F.gelu), ROWS, WIDTH),
    "silu": _built(lambda: Dense(F.silu), ROWS, WIDTH),
    "frozen_norms": _built(lambda: Dense(F.gelu, frozen=True), ROWS, WIDTH),
    "gated": _built(Gated, ROWS, WIDTH),
    "convolutions": _built(Convolutions, 8, 3, SIDE, SIDE),
}
