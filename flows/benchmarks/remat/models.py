"""Builds the models of the rematerialization benchmark, each in two sizes.

`tiny` is for tests, `small` for steps of less than a second or two on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from stowage.flows.benchmarks.remat.modules import LSTM, UNO, Mamba, Mixer, ResNet, UNet
from stowage.flows.benchmarks.remat.names import Size
from stowage.stages.workload.calls import Loss
from stowage.stages.workload.models import build_model
from stowage.stages.workload.randomness import seeded
from stowage.stages.workload.samples import Batch, sample_batch


@dataclass(frozen=True)
class RematCase:
    """A model, what it trains on, and its lists of layers for peers.

    Attributes:
        model: in training mode, dropout on where it has any.
        batch: keyword arguments of its forward.
        loss: `loss(outputs, batch)`; None where the outputs have a `.loss`.
        layers: paths of lists of layers for checkpointing by hand.
        grouped: a list calls its layers one after another on nothing but what the one before returned, so that several
            may share a checkpoint.
    """

    model: nn.Module
    batch: Batch
    loss: Loss | None = None
    layers: tuple[str, ...] = ()
    grouped: bool = True


def mean_square(outputs: Any, batch: Batch) -> Any:
    """Return a loss for outputs without labels."""
    del batch
    return (outputs.float() ** 2).mean()


def classify(outputs: Any, batch: Batch) -> Any:
    """Return the cross-entropy with the sample's number as its class."""
    del batch
    return F.cross_entropy(outputs, torch.arange(outputs.shape[0], device=outputs.device) % outputs.shape[1])


def next_token(outputs: Any, batch: Batch) -> Any:
    """Return the cross-entropy with the next of the batch's `ids`."""
    return F.cross_entropy(outputs[:, :-1].flatten(0, 1), batch["ids"][:, 1:].flatten())


def _images(size: Size, tiny: tuple[int, int], small: tuple[int, int]) -> Batch:
    samples, side = tiny if size == "tiny" else small
    return {"x": torch.randn(samples, 3, side, side)}


def _tokens(vocabulary: int, samples: int, length: int) -> Batch:
    return {"ids": torch.randint(0, vocabulary, (samples, length))}


def _unet(size: Size, depth: int | None) -> RematCase:
    del depth
    model = UNet((4, 8, 16) if size == "tiny" else (32, 64, 128, 256))
    return RematCase(model, _images(size, (2, 16), (4, 64)), mean_square, ("down", "up"), grouped=False)


def transformer(size: Size, depth: int | None = None) -> RematCase:
    """Build an `nn.Transformer` with as many decoder layers as encoder layers, 6 + 6 by default."""
    layers = depth or 6
    width, heads, samples, length = (32, 4, 2, 12) if size == "tiny" else (256, 8, 8, 64)
    model = nn.Transformer(width, heads, layers, layers, 4 * width, dropout=0.1, batch_first=True)
    batch = {"src": torch.randn(samples, length, width), "tgt": torch.randn(samples, length * 2 // 3, width)}
    return RematCase(model, batch, mean_square, ("encoder.layers", "decoder.layers"))


def _t5(size: Size, depth: int | None) -> RematCase:
    width, samples, length = (32, 2, 12) if size == "tiny" else (256, 8, 64)
    shape = {"d_model": width, "d_kv": width // 4, "d_ff": 2 * width, "num_heads": 4, "vocab_size": 64}
    model = build_model("t5", shape | {"num_layers": depth or (2 if size == "tiny" else 4)}, seed=0)
    return RematCase(model, sample_batch(model, samples, length, 1))


def _resnet101(size: Size, depth: int | None) -> RematCase:
    del depth
    model = ResNet(4 if size == "tiny" else 16, (3, 4, 23, 3), 5)
    return RematCase(model, _images(size, (4, 32), (8, 96)), classify, ("layers",))


def _uno(size: Size, depth: int | None) -> RematCase:
    width, side, levels, modes = (4, 16, 2, 3) if size == "tiny" else (16, 64, 3, 12)
    model = UNO(width, side, levels, depth or 3, modes)
    return RematCase(model, _images(size, (6, 16), (8, 64)), mean_square, ("down", "up"), grouped=False)


def _lstm(size: Size, depth: int | None) -> RematCase:
    width, samples, length = (32, 16, 32) if size == "tiny" else (256, 64, 64)
    return RematCase(LSTM(16, width, depth or 1), _tokens(16, samples, length), next_token)


def _mamba(size: Size, depth: int | None) -> RematCase:
    width, states, samples = (8, 4, 2) if size == "tiny" else (64, 16, 4)
    return RematCase(Mamba(16, width, depth or 1, states), _tokens(16, samples, 256), next_token, ("layers",))


def _regnet(size: Size, depth: int | None) -> RematCase:
    tiny = {"embedding_size": 8, "hidden_sizes": [8, 16, 16, 32], "depths": [6, 2, 2, 1], "groups_width": 8}
    small = {"embedding_size": 32, "hidden_sizes": [32, 64, 128, 256], "depths": [2, 4, 6, 2], "groups_width": 16}
    del depth
    model = build_model("regnet", {**(tiny if size == "tiny" else small), "num_labels": 5}, seed=0)
    return RematCase(
        model, sample_batch(model, *((4, 32) if size == "tiny" else (8, 96)), 1), layers=("regnet.encoder.stages",)
    )


def _mixer(size: Size, depth: int | None) -> RematCase:
    side, patch, width = (16, 4, 16) if size == "tiny" else (64, 8, 256)
    model = Mixer(side, patch, width, depth or (3 if size == "tiny" else 8), 5)
    return RematCase(model, _images(size, (4, 16), (16, 64)), classify, ("layers",))


def _gpt2(size: Size, depth: int | None) -> RematCase:
    width, samples, length = (32, 2, 12) if size == "tiny" else (256, 4, 128)
    shape = {"n_embd": width, "n_head": 4, "n_positions": length, "vocab_size": 64 if size == "tiny" else 256}
    model = build_model("gpt2", shape | {"n_layer": depth or (3 if size == "tiny" else 8)}, seed=0)
    return RematCase(model, sample_batch(model, samples, length, 1), layers=("transformer.h",))


_BUILDERS: dict[str, Callable[[Size, int | None], RematCase]] = {
    "unet": _unet,
    "transformer": transformer,
    "t5": _t5,
    "resnet101": _resnet101,
    "uno": _uno,
    "lstm": _lstm,
    "mamba": _mamba,
    "regnet": _regnet,
    "mixer": _mixer,
    "gpt2": _gpt2,
}

MODELS = tuple(_BUILDERS)


def build(name: str, size: Size = "small", depth: int | None = None) -> RematCase:
    """Build a model with its batch, the same each time; global generators are left alone.

    Args:
        name: one of `MODELS`.
        size: the size of the model.
        depth: layers, of each half where there are two; `unet`, `resnet101` and `regnet` have one depth only.

    Raises:
        KeyError: there is no such model.
    """
    with seeded(0):
        case = _BUILDERS[name](size, depth)
    case.model.train()
    return case
