"""What these tests train: small models of the kinds whose kernels differ between devices, each with an optimizer.

Sequences are short on the CPU, where the same code runs in a moment, and 512 tokens on a GPU: shorter ones fit one tile
of a fused attention, whose sums then have one order however the work is split.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from stowage.stages.workload.models import build_model
from stowage.stages.workload.randomness import seeded
from stowage.stages.workload.samples import Batch, sample_batch

MakeOptimizer = Callable[[Iterable[Any]], torch.optim.Optimizer]

SHORT, LONG = 16, 512
"""Tokens of a sequence, on the CPU and on a GPU."""

ROWS = 2
"""Of a batch."""

GPT2 = {"n_layer": 2, "n_embd": 64, "n_head": 2, "n_positions": LONG, "vocab_size": 128}
LLAMA = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 128,
}
WIDE_LLAMA = LLAMA | {
    "hidden_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "intermediate_size": 2816,
    "vocab_size": 4096,
}
"""Some 400 MB of weights in float32: its copies take long enough to be late."""


class Convolutions(nn.Module):
    """Convolutions and batch norm. It has no pooling layer: on CUDA their backward has no deterministic kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True)),
            *(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Dropout(0.1)),
        )
        self.head = nn.Linear(32, 5)

    def forward(self, pixels: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": F.cross_entropy(self.head(self.layers(pixels).mean((2, 3))), labels)}


class Recurrent(nn.Module):
    """Two LSTMs over few distinct tokens, with dropout between them; with `inside`, as two layers of one.

    cuDNN's own dropout draws from a state that PyTorch makes for it at the first forward and after `manual_seed`: those
    of the generators say nothing of it.
    """

    def __init__(self, tokens: int, *, inside: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(tokens, 32)
        if inside:
            self.layers = nn.ModuleList([nn.LSTM(32, 48, num_layers=2, dropout=0.2, batch_first=True)])
        else:
            self.layers = nn.ModuleList(nn.LSTM(width, 48, batch_first=True) for width in (32, 48))
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(48, tokens)

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        found = self.embed(ids)
        for layer in self.layers:
            found = self.dropout(layer(found)[0])
        return {"loss": F.cross_entropy(self.head(found)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())}


class Tables(nn.Module):
    """Tables of one, two and three rows: an index made up without a look at them would point outside."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, 32) for rows in (1, 2, 3))
        self.chosen = nn.Parameter(torch.randn(1, 32))
        self.head = nn.Linear(32, 3)

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        found = [table(ids.clamp(max=table.num_embeddings - 1)) for table in self.tables]
        scores = self.head(torch.stack(found).sum(0) + self.chosen[torch.zeros_like(ids)])
        return {"loss": F.cross_entropy(scores.flatten(0, 1), ids.flatten())}


Entry = tuple[nn.Module, Callable[[int], Batch]]
"""A model, and its batches by number."""


def _transformer(architecture: str, overrides: dict[str, Any], length: int) -> Entry:
    model = build_model(architecture, overrides, seed=0)
    return model, lambda number: sample_batch(model, ROWS, length, 1 + number)


def _convolutions(length: int) -> Entry:
    def batch(number: int) -> Batch:
        with seeded(1 + number):
            return {"pixels": torch.randn(4 * ROWS, 3, 16, 16), "labels": torch.arange(4 * ROWS) % 5}

    return Convolutions(), batch


def _recurrent(length: int, *, inside: bool = False) -> Entry:
    return Recurrent(64, inside=inside), partial(_ids, 64, length)


def _tables(length: int) -> Entry:
    return Tables(), partial(_ids, 3, length)


def _ids(tokens: int, length: int, number: int) -> Batch:
    with seeded(1 + number):
        return {"ids": torch.randint(0, tokens, (ROWS, length))}


MODELS: dict[str, Callable[[int], Entry]] = {
    "gpt2": partial(_transformer, "gpt2", GPT2),
    "llama": partial(_transformer, "llama", LLAMA),
    "wide llama": partial(_transformer, "llama", WIDE_LLAMA),
    "convolutions": _convolutions,
    "recurrent": _recurrent,
    "dropout inside": partial(_recurrent, inside=True),
    "tables": _tables,
}
TRANSFORMERS = ("gpt2", "llama")
"""The former with dropout, in attention too."""

adamw = partial(torch.optim.AdamW, lr=1e-2)
fused = partial(torch.optim.AdamW, lr=1e-2, fused=True)
foreach = partial(torch.optim.AdamW, lr=1e-2, foreach=True)
capturable = partial(torch.optim.AdamW, lr=1e-2, capturable=True)


@dataclass(frozen=True)
class Case:
    """One training configuration.

    Attributes:
        model: of `MODELS`.
        device: `cpu`, `cuda` or `cuda:1`.
        dtype: of weights and pixels.
        optimizer: of parameters.
        max_grad_norm: see `MicroBatch`.
        autocast: forward and loss under autocast to bfloat16.
        micro_batches: of one update.
    """

    model: str
    device: str
    dtype: torch.dtype = torch.float32
    optimizer: MakeOptimizer = adamw
    max_grad_norm: float | None = None
    autocast: bool = False
    micro_batches: int = 1

    @property
    def on_gpu(self) -> bool:
        """Whether it runs on one."""
        return self.device != "cpu"

    def build(self) -> tuple[nn.Module, list[Batch]]:
        """The model in training mode, and the micro-batches of one update: the same every time."""
        with seeded(0):
            model, batch_of = MODELS[self.model](LONG if self.on_gpu else SHORT)
        batches = [
            {n: t.to(self.device, self.dtype if t.is_floating_point() else None) for n, t in batch_of(i).items()}
            for i in range(self.micro_batches)
        ]
        return model.to(self.device, self.dtype).train(), batches

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """What one micro-batch differentiates."""
        kind = torch.device(self.device).type
        with torch.autocast(kind, torch.bfloat16) if self.autocast else nullcontext():
            found: torch.Tensor = model(**batch)["loss"]
        return found
