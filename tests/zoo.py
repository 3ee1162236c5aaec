"""Small models of every kind that training has to get right: seconds on a CPU, dropout on, in training mode.

`ZOO[name]()` returns `(model, batch, loss)`: the model is called as `model(**batch)`; `loss(outputs, batch)` gives the
loss, and is None where the outputs have a `.loss`. Each call builds the same model and batch anew, and leaves the
global generators alone.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from stowage.flows.benchmarks.remat import models as _remat_models
from stowage.stages.workload.models import build_model
from stowage.stages.workload.randomness import seeded
from stowage.stages.workload.samples import Batch, sample_batch

Loss = Callable[[Any, Batch], torch.Tensor]
Entry = tuple[nn.Module, Batch, Loss | None]

BATCH, LENGTH, WIDTH, VOCAB = 2, 12, 32, 64
GPT2 = {"n_layer": 3, "n_embd": WIDTH, "n_head": 2, "n_positions": 16, "vocab_size": VOCAB}
LLAMA = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 32,
    "vocab_size": VOCAB,
}


def _transformers(architecture: str, **overrides: Any) -> Entry:
    model = build_model(architecture, overrides, seed=0)
    return model, sample_batch(model, BATCH, LENGTH, 1), None


def gpt2() -> Entry:
    return _transformers("gpt2", **GPT2)


def llama() -> Entry:
    return _transformers("llama", **LLAMA, attention_dropout=0.1)


def mistral() -> Entry:
    return _transformers("mistral", **LLAMA, sliding_window=8, attention_dropout=0.1)


def phi() -> Entry:
    return _transformers("phi", **(LLAMA | {"num_key_value_heads": 4}), resid_pdrop=0.1, embd_pdrop=0.1)


def bloom() -> Entry:
    return _transformers("bloom", hidden_size=WIDTH, n_layer=2, n_head=4, vocab_size=VOCAB, hidden_dropout=0.1)


def bert() -> Entry:
    return _transformers(
        "bert",
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=32,
        vocab_size=VOCAB,
    )


def vit() -> Entry:
    return _transformers(
        "vit",
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        image_size=16,
        patch_size=4,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
    )


def t5() -> Entry:
    return _transformers("t5", d_model=WIDTH, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=VOCAB)


def gpt2_mask() -> Entry:
    """Padding in the attention mask, which every layer reads."""
    model, batch, _ = gpt2()
    mask = torch.ones(BATCH, LENGTH, dtype=torch.int64)
    mask[1, :3] = 0
    return model, batch | {"attention_mask": mask}, None


def gpt2_bf16() -> Entry:
    model, batch, _ = gpt2()
    return model.to(torch.bfloat16), batch, None


def gpt2_frozen() -> Entry:
    """Parameters that do not train, at the input, inside, and between trained ones."""
    model, batch, _ = gpt2()
    for name, parameter in model.named_parameters():
        if name == "transformer.wpe.weight" or name.startswith(("transformer.h.1.mlp", "transformer.h.2.ln_1")):
            parameter.requires_grad_(False)
    return model, batch, None


def gpt2_untied() -> Entry:
    return _transformers("gpt2", **GPT2, tie_word_embeddings=False)


def _own(build: Callable[[], tuple[nn.Module, Batch]], loss: Loss) -> Entry:
    with seeded(0):
        model, batch = build()
    return model.train(), batch, loss


def _mean_square(outputs: Any, batch: Batch) -> Any:
    del batch
    return (outputs.float() ** 2).mean()


def _classify(outputs: Any, batch: Batch) -> Any:
    del batch
    return F.cross_entropy(outputs, torch.arange(outputs.shape[0]) % outputs.shape[1])


class _ResidualBlock(nn.Module):
    """ResNet's basic block, in-place ReLU included."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: torch.Tensor) -> Any:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += self.shortcut(x)
        return self.relu(y)


class _ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.layers = nn.Sequential(_ResidualBlock(8, 8, 1), _ResidualBlock(8, 16, 2), _ResidualBlock(16, 32, 2))
        self.head = nn.Linear(32, 5)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(F.adaptive_avg_pool2d(self.layers(self.stem(x)), 1).flatten(1))


def resnet() -> Entry:
    return _own(lambda: (_ResNet(), {"x": torch.randn(4, 3, 16, 16)}), _classify)


def resnet_transformers() -> Entry:
    model = build_model(
        "resnet",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2], "layer_type": "basic", "num_labels": 5},
        seed=0,
    )
    return model, sample_batch(model, 4, 32, 1), None


class _UNet(nn.Module):
    """Skips from every level of the way down to the same level of the way up."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (3, 8, 16)
        self.down = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in pairwise(sizes))
        self.middle = nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.SiLU(), nn.Dropout(0.1))
        self.up = nn.ModuleList((nn.Conv2d(32 + 16, 16, 3, padding=1), nn.Conv2d(16 + 8, 8, 3, padding=1)))
        self.out = nn.Conv2d(8, 1, 1)

    def forward(self, x: torch.Tensor) -> Any:
        skips = []
        for layer in self.down:
            x = F.relu(layer(x))
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for layer in self.up:
            x = F.interpolate(x, scale_factor=2.0, mode="nearest")
            x = F.relu(layer(torch.cat([x, skips.pop()], dim=1)))
        return self.out(x)


def unet() -> Entry:
    return _own(lambda: (_UNet(), {"x": torch.randn(2, 3, 16, 16)}), _mean_square)


def transformer() -> Entry:
    """PyTorch's own encoder and decoder; the source is read by every decoder layer."""

    def build() -> tuple[nn.Module, Batch]:
        model = nn.Transformer(WIDTH, 4, 2, 2, 64, dropout=0.1, batch_first=True)
        return model, {"src": torch.randn(BATCH, LENGTH, WIDTH), "tgt": torch.randn(BATCH, 8, WIDTH)}

    return _own(build, _mean_square)


class _Tied(nn.Module):
    """One weight used first and last, and one layer used again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> Any:
        x = self.embed(ids)
        for _ in range(4):
            x = x + self.dropout(torch.tanh(self.layer(x)))
        return self.head(x)


def tied() -> Entry:
    def loss(outputs: Any, batch: Batch) -> Any:
        return F.cross_entropy(outputs.flatten(0, 1), batch["ids"].flatten())

    return _own(lambda: (_Tied(), {"ids": torch.randint(0, VOCAB, (BATCH, LENGTH))}), loss)


class _LSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: torch.Tensor) -> Any:
        return self.head(self.lstm(self.embed(ids))[0])


def lstm() -> Entry:
    def loss(outputs: Any, batch: Batch) -> Any:
        return F.cross_entropy(outputs[:, :-1].flatten(0, 1), batch["ids"][:, 1:].flatten())

    return _own(lambda: (_LSTM(), {"ids": torch.randint(0, VOCAB, (BATCH, 8))}), loss)


ROWS = 128
"""Rows of a batch of the small networks: enough that activations outweigh their weights."""


class _MLP(nn.Module):
    """Layers that the entries below vary."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> Any:
        return self.layers(x)


def _mlp(*layers: nn.Module) -> tuple[nn.Module, Batch]:
    model = _MLP(nn.Linear(16, WIDTH), *layers, nn.Linear(WIDTH, 4))
    return model, {"x": torch.randn(ROWS, 16)}


def batchnorm() -> Entry:
    """Running statistics change once an iteration, whatever is computed again."""

    def build() -> tuple[nn.Module, Batch]:
        return _mlp(
            nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Dropout(0.2)
        )

    return _own(build, _classify)


def dropout_zero() -> Entry:
    return _own(lambda: _mlp(nn.Dropout(0.0), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.0)), _classify)


def in_place() -> Entry:
    """Activations written over their own inputs."""
    return _own(
        lambda: _mlp(
            nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH), nn.SiLU(inplace=True), nn.Dropout(0.1, inplace=True)
        ),
        _classify,
    )


def y_sum() -> Entry:
    """The gradient of the output is one number, expanded: its strides are 0."""

    def loss(outputs: Any, batch: Batch) -> Any:
        del batch
        return outputs.sum()

    def build() -> tuple[nn.Module, Batch]:
        return _mlp(*(layer for _ in range(5) for layer in (nn.Tanh(), nn.Dropout(0.1), nn.Linear(WIDTH, WIDTH))))

    return _own(build, loss)


class _TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1))]
        self.trunk = nn.Sequential(nn.Linear(16, WIDTH), *layers)
        self.left, self.right = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.trunk(x)
        return self.left(hidden), self.right(hidden)


def two_outputs() -> Entry:
    def loss(outputs: Any, batch: Batch) -> Any:
        return _classify(outputs[0], batch) + (outputs[1] ** 2).mean()

    return _own(lambda: (_TwoOutputs(), {"x": torch.randn(ROWS, 16)}), loss)


class _Optional(nn.Module):
    """Takes a list of tensors, a number, a flag, and an argument that may be None."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, WIDTH)
        self.head = nn.Linear(WIDTH, 4)

    def forward(
        self, parts: list[torch.Tensor], extra: torch.Tensor | None, scale: float, square: bool
    ) -> dict[str, Any]:
        x = sum((self.layer(part) for part in parts[1:]), self.layer(parts[0]))
        if extra is not None:
            x = x + extra
        x = torch.tanh(x * scale)
        return {"prediction": self.head(x * x if square else x), "unused": None}


def optional_inputs() -> Entry:
    def build() -> tuple[nn.Module, Batch]:
        parts = [torch.randn(8, 16), torch.randn(8, 16)]
        return _Optional(), {"parts": parts, "extra": None, "scale": 0.5, "square": True}

    return _own(build, lambda outputs, batch: _classify(outputs["prediction"], batch))


class _ReturnsInput(nn.Module):
    """Hands its input back beside the result, as it came and as a view."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return x, x.view(-1), torch.sigmoid(self.layer(x))


def returns_input() -> Entry:
    def loss(outputs: Any, batch: Batch) -> Any:
        del batch
        return F.mse_loss(outputs[2], outputs[0]) + 0.1 * outputs[1].abs().mean()

    return _own(lambda: (_ReturnsInput(), {"x": torch.randn(8, 16)}), loss)


ZOO: dict[str, Callable[[], Entry]] = {
    build.__name__: build
    for build in (
        gpt2, llama, mistral, phi, bloom, bert, vit, t5, gpt2_mask, gpt2_bf16, gpt2_frozen, gpt2_untied, resnet,
        resnet_transformers, unet, transformer, tied, lstm, batchnorm, dropout_zero, in_place, y_sum, two_outputs,
        optional_inputs, returns_input,
    )
}  # fmt: skip


def _remat(name: str) -> Callable[[], Entry]:
    def build() -> Entry:
        case = _remat_models.build(name, "tiny")
        return case.model, case.batch, case.loss

    return build


REMAT: dict[str, Callable[[], Entry]] = {name: _remat(name) for name in _remat_models.MODELS}
"""The models of the rematerialization benchmark, tiny: graphs that are no chain of small blocks, and very long ones."""


def loss_of(model: nn.Module, batch: Batch, loss: Loss | None) -> torch.Tensor:
    """The loss of one forward, as eager PyTorch computes it."""
    outputs = model(**batch)
    value: torch.Tensor = outputs.loss if loss is None else loss(outputs, batch)
    return value
