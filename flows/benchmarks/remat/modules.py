"""Networks that are no plain chain of small blocks, the subject of chapters 2 and 3 of the thesis, written small.

Each is a plain module with random weights. The layers that can be checkpointed by hand are a list
(`nn.ModuleList` or `nn.Sequential`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


class DoubleConv(nn.Sequential):
    """Two convolutions, each with group normalisation and SiLU."""

    def __init__(self, channels_in: int, channels: int, dropout: float) -> None:
        super().__init__(
            nn.Conv2d(channels_in, channels, 3, padding=1),
            nn.GroupNorm(4, channels),
            nn.SiLU(),
            nn.Dropout(dropout),
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.GroupNorm(4, channels),
            nn.SiLU(),
        )


class UNet(nn.Module):
    """A U-Net from `(N, 3, side, side)` to one channel, with skips from every level down to that on the way up."""

    def __init__(self, widths: Sequence[int], dropout: float = 0.1) -> None:
        super().__init__()
        self.down = nn.ModuleList(DoubleConv(a, b, dropout) for a, b in pairwise((3, *widths)))
        self.up = nn.ModuleList(DoubleConv(a + b, b, dropout) for b, a in reversed(list(pairwise(widths))))
        self.out = nn.Conv2d(widths[0], 1, 1)

    def forward(self, x: torch.Tensor) -> Any:
        """Map `(N, 3, side, side)` to `(N, 1, side, side)`."""
        skips: list[torch.Tensor] = []
        for layer in self.down:
            x = layer(F.max_pool2d(x, 2) if skips else x)
            skips.append(x)
        skips.pop()
        for layer in self.up:
            x = F.interpolate(x, scale_factor=2.0, mode="nearest")
            x = layer(torch.cat([x, skips.pop()], dim=1))
        return self.out(x)


class Bottleneck(nn.Module):
    """ResNet's block of three convolutions, with in-place ReLU and addition."""

    def __init__(self, channels_in: int, width: int, stride: int) -> None:
        super().__init__()
        channels = 4 * width
        self.conv1 = nn.Conv2d(channels_in, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, channels, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: torch.Tensor) -> Any:
        """Apply the three convolutions, and add the shortcut."""
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        y += self.shortcut(x)
        return self.relu(y)


class ResNet(nn.Module):
    """ResNet of bottleneck blocks; `depths` (3, 4, 23, 3) is ResNet-101."""

    def __init__(self, width: int, depths: Sequence[int], classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )
        blocks, channels = [], width
        for stage, depth in enumerate(depths):
            for i in range(depth):
                blocks.append(Bottleneck(channels, width << stage, 2 if stage and not i else 1))
                channels = 4 * (width << stage)
        self.layers = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, classes)

    def forward(self, x: torch.Tensor) -> Any:
        """Map images to one number for each class."""
        return self.head(F.adaptive_avg_pool2d(self.layers(self.stem(x)), 1).flatten(1))


class SpectralConv(nn.Module):
    """A product with complex weights of the lowest `modes` frequencies of each dimension (FNO)."""

    def __init__(self, channels_in: int, channels: int, modes: int) -> None:
        super().__init__()
        self.modes = modes
        shape = (2, channels_in, channels, modes, modes)
        self.weight = nn.Parameter(torch.randn(shape, dtype=torch.cfloat) / channels_in)

    def forward(self, x: torch.Tensor, side: int) -> Any:
        """Map `(N, channels_in, s, s)` to `(N, channels, side, side)`."""
        m = self.modes
        low = torch.fft.rfft2(x, norm="forward")
        high = low.new_zeros(x.shape[0], self.weight.shape[2], side, side // 2 + 1)
        high[:, :, :m, :m] = torch.einsum("nixy,ioxy->noxy", low[:, :, :m, :m], self.weight[0])
        high[:, :, -m:, :m] = torch.einsum("nixy,ioxy->noxy", low[:, :, -m:, :m], self.weight[1])
        return torch.fft.irfft2(high, s=(side, side), norm="forward")


class OperatorLayer(nn.Module):
    """UNO's layer: a spectral convolution beside a pointwise one, both to `side`."""

    def __init__(self, channels_in: int, channels: int, modes: int, side: int, dropout: float) -> None:
        super().__init__()
        self.side = side
        self.spectral = SpectralConv(channels_in, channels, modes)
        self.pointwise = nn.Conv2d(channels_in, channels, 1)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> Any:
        """Add both convolutions, and apply GELU and dropout."""
        beside = self.pointwise(x)
        if x.shape[-1] != self.side:
            beside = F.interpolate(beside, size=(self.side, self.side), mode="bilinear", align_corners=True)
        return self.dropout(F.gelu(self.spectral(x, self.side) + beside))


class UNO(nn.Module):
    """A U-shaped neural operator: each level on half the grid with twice the channels, skips between.

    It has `depth` layers a level on the way down and on the way up.
    """

    def __init__(self, width: int, side: int, levels: int, depth: int, modes: int, dropout: float = 0.1) -> None:
        super().__init__()

        def level(channels_in: int, number: int, coarsest: int, layers: int) -> nn.Sequential:
            channels = [channels_in] + layers * [width << number]
            kept = min(modes, (side >> coarsest) // 2)
            return nn.Sequential(*(OperatorLayer(a, b, kept, side >> number, dropout) for a, b in pairwise(channels)))

        finer = list(reversed(range(levels - 1)))
        self.lift = nn.Conv2d(3, width, 1)
        self.down = nn.ModuleList(level(width << max(n - 1, 0), n, n, depth) for n in range(levels))
        self.rise = nn.ModuleList(level(2 * width << n, n, n + 1, 1) for n in finer)
        self.up = nn.ModuleList(level(2 * width << n, n, n, depth) for n in finer)
        self.project = nn.Conv2d(width, 1, 1)

    def forward(self, x: torch.Tensor) -> Any:
        """Map `(N, 3, side, side)` to `(N, 1, side, side)`."""
        x = self.lift(x)
        skips = []
        for layers in self.down:
            x = layers(x)
            skips.append(x)
        skips.pop()
        for rise, layers in zip(self.rise, self.up):
            x = layers(torch.cat([rise(x), skips.pop()], dim=1))
        return self.project(x)


class LSTM(nn.Module):
    """A recurrent language model written as a loop: every time step is operations of its own, not one fused kernel."""

    def __init__(self, vocabulary: int, width: int, layers: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.dropout = nn.Dropout(dropout)
        self.cells = nn.ModuleList(nn.LSTMCell(width, width) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: torch.Tensor) -> Any:
        """Map `(N, steps)` to `(N, steps, vocabulary)`."""
        inputs = self.dropout(self.embed(ids)).unbind(1)
        for cell in self.cells:
            state, outputs = None, []
            for x in inputs:
                state = cell(x, state)
                outputs.append(state[0])
            inputs = tuple(outputs)
        return self.head(self.dropout(torch.stack(inputs, dim=1)))


class SelectiveScan(nn.Module):
    """Mamba's mixer with its recurrence written out, token by token: h = exp(Δ A) h + Δ B x, y = C h + D x.

    Nothing of the size tokens × width × states is ever one tensor, so that any part of it can be computed again.
    """

    def __init__(self, width: int, states: int) -> None:
        super().__init__()
        inner = 2 * width
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, 2 * inner, bias=False)
        self.conv = nn.Conv1d(inner, inner, 4, padding=3, groups=inner)
        self.steps = nn.Linear(inner, inner)
        self.selects = nn.Linear(inner, 2 * states, bias=False)
        self.log_decay = nn.Parameter(torch.arange(1, states + 1, dtype=torch.float32).log().repeat(inner, 1))
        self.skip = nn.Parameter(torch.ones(inner))
        self.outer = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> Any:
        """Map `(N, tokens, width)` to the same shape."""
        tokens = x.shape[1]
        u, gate = self.inner(self.norm(x)).chunk(2, dim=-1)
        u = F.silu(self.conv(u.transpose(1, 2))[..., :tokens].transpose(1, 2))
        steps = F.softplus(self.steps(u))
        write, read = self.selects(u).chunk(2, dim=-1)
        decay = -torch.exp(self.log_decay)
        h = x.new_zeros(x.shape[0], *decay.shape)
        outputs = []
        for step, written, into, out_of in zip(
            steps[..., None].unbind(1),
            (steps * u)[..., None].unbind(1),
            write[:, :, None].unbind(1),
            read[..., None].unbind(1),
        ):
            h = torch.exp(step * decay) * h + written * into
            outputs.append(h @ out_of)
        y = torch.stack(outputs, dim=1)[..., 0] + u * self.skip
        return x + self.outer(y * F.silu(gate))


class Mamba(nn.Module):
    """A language model of selective scans."""

    def __init__(self, vocabulary: int, width: int, layers: int, states: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(SelectiveScan(width, states) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: torch.Tensor) -> Any:
        """Map `(N, tokens)` to `(N, tokens, vocabulary)`."""
        x = self.dropout(self.embed(ids))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class MixerLayer(nn.Module):
    """An MLP over tokens, then one over channels."""

    def __init__(self, tokens: int, width: int, dropout: float) -> None:
        super().__init__()

        def mlp(size: int, hidden: int) -> nn.Sequential:
            return nn.Sequential(
                nn.Linear(size, hidden), nn.GELU(), nn.Dropout(dropout), nn.Linear(hidden, size), nn.Dropout(dropout)
            )

        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens, self.channels = mlp(tokens, 2 * tokens), mlp(width, 4 * width)

    def forward(self, x: torch.Tensor) -> Any:
        """Map `(N, tokens, width)` to the same shape."""
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


class Mixer(nn.Module):
    """MLP-Mixer: patches of an image, mixed by MLPs alone."""

    def __init__(self, side: int, patch: int, width: int, layers: int, classes: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        tokens = (side // patch) ** 2
        self.layers = nn.Sequential(*(MixerLayer(tokens, width, dropout) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> Any:
        """Map images to one number for each class."""
        x = self.patches(x).flatten(2).transpose(1, 2)
        return self.head(self.norm(self.layers(x)).mean(dim=1))
