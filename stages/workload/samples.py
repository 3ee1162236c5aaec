"""Makes a synthetic batch for a model: the keyword arguments of its forward, loss included."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor

from stowage.stages.ir.errors import ParameterError
from stowage.stages.workload.randomness import generator

Batch = dict[str, Any]
"""Keyword arguments of the model's forward."""


def sample_batch(model: nn.Module, batch_size: int, sequence_length: int, seed: int) -> Batch:
    """Return a random batch; the same seed gives the same batch, and no global generator is touched.

    Token models get `input_ids` and `labels`, int64 `(batch_size, sequence_length)`; image models `pixel_values`
    `(batch_size, channels, side, side)` in the weights' dtype and `labels` `(batch_size,)`; speech models
    `input_features` and `labels`. The side is the configuration's `image_size`; for models of any size (ResNet) it is
    `sequence_length` pixels. Tensors are on the model's device, and fake when the model is.

    Raises:
        ParameterError: sizes that the model cannot take, or a model whose arguments are not known here.
    """
    for name, size in (("batch_size", batch_size), ("sequence_length", sequence_length)):
        if size < 1:
            raise ParameterError(f"trace.{name} is {size}: it must be at least 1.")
    config, reference = getattr(model, "config", None), next(model.parameters())
    kind = getattr(model, "main_input_name", None) if config is not None else None
    mode: Any = contextlib.nullcontext()
    if isinstance(reference, FakeTensor) and active_fake_mode() is None:
        mode = reference.fake_mode
    with mode:
        draw = generator(seed)
        match kind:
            case "input_ids":
                batch = _tokens(config, batch_size, sequence_length, draw)
            case "pixel_values":
                batch = _images(config, batch_size, sequence_length, draw)
            case "input_features":
                batch = _speech(config, batch_size, sequence_length, draw)
            case _:
                raise ParameterError(
                    f"No batch can be made for {type(model).__name__}: write a function that returns "
                    "(model, sample_batch) and name it in trace.model.callable."
                )
        return {
            name: tensor.to(reference.device, reference.dtype if tensor.is_floating_point() else None)
            for name, tensor in batch.items()
        }


def _tokens(config: Any, batch_size: int, length: int, draw: torch.Generator) -> dict[str, torch.Tensor]:
    limit = getattr(config, "max_position_embeddings", None)
    if isinstance(limit, int) and 0 < limit < length:
        raise ParameterError(f"trace.sequence_length is {length}, but the model has positions for {limit} tokens only.")
    ids = torch.randint(0, config.vocab_size, (batch_size, length), generator=draw, device="cpu")
    return {"input_ids": ids, "labels": ids.clone()}


def _images(config: Any, batch_size: int, length: int, draw: torch.Generator) -> dict[str, torch.Tensor]:
    size = getattr(config, "image_size", length)
    height, width = size if isinstance(size, (tuple, list)) else (size, size)
    return {
        "pixel_values": torch.randn(
            batch_size, getattr(config, "num_channels", 3), height, width, generator=draw, device="cpu"
        ),
        "labels": torch.randint(0, max(config.num_labels, 2), (batch_size,), generator=draw, device="cpu"),
    }


def _speech(config: Any, batch_size: int, length: int, draw: torch.Generator) -> dict[str, torch.Tensor]:
    limit = config.max_target_positions
    if length > limit:
        raise ParameterError(f"trace.sequence_length is {length}, but the model has positions for {limit} tokens only.")
    return {
        "input_features": torch.randn(
            batch_size, config.num_mel_bins, 2 * config.max_source_positions, generator=draw, device="cpu"
        ),
        "labels": torch.randint(0, config.vocab_size, (batch_size, length), generator=draw, device="cpu"),
    }
