"""Models of whose calls PyTorch chooses kernels by what trains."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from stowage.stages.workload.randomness import seeded
from tests.zoo import Entry


class Mixer(nn.Module):
    """Mixes positions by linear layers of a transposed tensor, and by a weight in the order of its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.channels = nn.LayerNorm(48), nn.Linear(48, 48)
        self.widen, self.narrow = nn.Linear(40, 80), nn.Linear(80, 40)
        self.weight = nn.Parameter(torch.randn(40, 40) / 6)

    def forward(self, x: torch.Tensor) -> Any:
        mixed = self.narrow(F.dropout(F.gelu(self.widen(self.norm(x).mT)), 0.1)).mT
        return self.channels(x + mixed + (x.mT @ self.weight).mT)


def mixer() -> Entry:
    with seeded(0):
        model = nn.Sequential(Mixer(), Mixer())
        return model, {"input": torch.randn(3, 40, 48)}, lambda out, batch: out.square().mean()


class Windows(nn.Module):
    """Attention with a bias that is learnt, out of a table or out of a small network, as in both versions of Swin."""

    def __init__(self, *, network: bool) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(48, 144), nn.Linear(48, 48)
        self.table = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 3)) if network else nn.Embedding(79, 3)
        self.register_buffer("places", torch.arange(40)[:, None] - torch.arange(40) + 39)

    def forward(self, x: torch.Tensor) -> Any:
        q, k, v = self.qkv(x).view(3, 40, 3, 3, 16).permute(2, 0, 3, 1, 4)
        places = self.places
        learnt = isinstance(self.table, nn.Embedding)
        bias = self.table(places if learnt else torch.stack([places / 39, places * 0.1], -1).to(x.dtype))
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.permute(2, 0, 1)[None].contiguous())
        return x + self.out(attended.transpose(1, 2).reshape(3, 40, 48))


def windows(*, network: bool = False, dtype: torch.dtype = torch.float32) -> Entry:
    with seeded(0):
        model = nn.Sequential(Windows(network=network), Windows(network=network)).to(dtype)
        return model, {"input": torch.randn(3, 40, 48, dtype=dtype)}, lambda out, batch: out.square().mean()


class Projected(nn.Module):
    """Attention with such a bias and projections of its own, as in BEiT."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(48, 48) for _ in range(4))
        self.bias = nn.Parameter(torch.randn(3, 40, 40))

    def forward(self, x: torch.Tensor) -> Any:
        q, k, v = (f(x).view(-1, 40, 3, 16).transpose(1, 2) for f in (self.query, self.key, self.value))
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=self.bias[None])
        return x + self.out(attended.transpose(1, 2).flatten(2))


def projected(samples: int = 3) -> Entry:
    with seeded(0):
        model = nn.Sequential(Projected(), Projected())
        return model, {"input": torch.randn(samples, 40, 48)}, lambda out, batch: out.square().mean()


class Scan(nn.Module):
    """A weight on the left of what it multiplies, as Mamba's time steps, and one that is computed of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(48, 64), nn.Linear(64, 48)
        self.steps = nn.Linear(64, 64)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(40, 40))
        self.pool = nn.Parameter(torch.randn(40) / 6)

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.first(x)
        steps = F.softplus(self.steps.weight @ hidden.transpose(1, 2) + self.steps.bias[:, None])
        last = self.last(steps.transpose(1, 2))
        return x + self.normed(last.mT).mT + (last.mT @ self.pool)[:, None]


def scan(samples: int = 3) -> Entry:
    with seeded(0):
        model = nn.Sequential(Scan(), Scan())
        return model, {"input": torch.randn(samples, 40, 48)}, lambda out, batch: out.square().mean()


class Normalised(nn.Module):
    """Attention with a bias that is learnt, of queries and keys that are normalised; residuals are turned."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.scale = nn.Linear(48, 144), nn.Linear(48, 48), nn.Parameter(torch.ones(48))
        self.of_query, self.of_key = nn.LayerNorm(16), nn.RMSNorm(16)
        self.bias, self.weight = nn.Parameter(torch.randn(3, 40, 40)), nn.Parameter(torch.randn(40, 48) / 7)

    def forward(self, x: torch.Tensor) -> Any:
        q, k, v = self.qkv(x).view(-1, 40, 3, 3, 16).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(self.of_query(q), self.of_key(k), v, attn_mask=self.bias[None])
        hidden = self.out(attended.transpose(1, 2).flatten(2)) * self.scale
        return x + F.gelu(self.weight @ (hidden * F.silu(hidden)).mT) @ x


def normalised(samples: int = 3) -> Entry:
    with seeded(0):
        model = nn.Sequential(Normalised(), Normalised())
        return model, {"input": torch.randn(samples, 40, 48)}, lambda out, batch: out.square().mean()


class Spectral(nn.Module):
    """Mixes frequencies by complex weights, as neural operators do, of positions and of channels."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(48, 48), nn.Linear(48, 48)
        self.channels = nn.Parameter(torch.randn(48, 48, dtype=torch.complex64) / 7)
        self.real, self.imaginary = nn.Parameter(torch.randn(21, 21) / 5), nn.Parameter(torch.randn(21, 21) / 5)

    def forward(self, x: torch.Tensor) -> Any:
        spectrum = torch.fft.rfft(self.first(x).mT)
        spectrum = spectrum.mT @ self.channels
        spectrum = torch.complex(self.real, self.imaginary).conj() @ spectrum
        return x + self.last(torch.fft.irfft(spectrum.mT @ self.real.to(spectrum.dtype), n=40).mT)


def spectral(samples: int = 3) -> Entry:
    with seeded(0):
        model = nn.Sequential(Spectral(), Spectral())
        return model, {"input": torch.randn(samples, 40, 48)}, lambda out, batch: out.square().mean()
