"""Builds the models of which freezing is measured: BERT-base, ViT-base, and a decoder with fused attention.

Batches are smaller than the paper's, so that plain PyTorch fits a small machine; what forward saves grows in proportion
to the batch, by which figures are scaled to the paper's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from stowage.stages.ir.lossy import MEASURED_BATCHES
from stowage.stages.workload.randomness import seeded


@dataclass(frozen=True)
class Frozen:
    """A model whose saved activations are measured.

    Attributes:
        label: name for people.
        make: makes the model and a batch.
        batch: samples of the batch.
        paper_batch: samples of the paper's batch; 0 where it has no such model.
        paper_gb: the paper's memory of activations without and with SlimFit, in GB.
        kinds: kinds of codes that are tried where a backward takes long; by default all that the table has.
        measured: samples that errors are measured on.
    """

    label: str
    make: Callable[[int], tuple[nn.Module, Any]]
    batch: int
    paper_batch: int = 0
    paper_gb: tuple[float, float] = (0.0, 0.0)
    kinds: tuple[str, ...] = ()
    measured: int = MEASURED_BATCHES


def bert(batch: int, **smaller: Any) -> tuple[nn.Module, Any]:
    """Return BERT-base for the classification of texts of 128 tokens."""
    import transformers

    with seeded(0):
        config = transformers.BertConfig(num_labels=2, **smaller)
        model: nn.Module = transformers.BertForSequenceClassification(config).train()
        tokens = torch.randint(0, config.vocab_size, (batch, min(128, config.max_position_embeddings)))
        return model, {"input_ids": tokens, "labels": torch.randint(0, 2, (batch,))}


def vit(batch: int, **smaller: Any) -> tuple[nn.Module, Any]:
    """Return ViT-base for pictures of 224 pixels."""
    import transformers

    with seeded(0):
        config = transformers.ViTConfig(num_labels=10, hidden_dropout_prob=0.1, **smaller)
        model: nn.Module = transformers.ViTForImageClassification(config).train()
        pictures = torch.randn(batch, 3, config.image_size, config.image_size)
        return model, {"pixel_values": pictures, "labels": torch.randint(0, 10, (batch,))}


def vit_large_pictures(batch: int, **smaller: Any) -> tuple[nn.Module, Any]:
    """Return ViT-base for pictures of 384 pixels, as the paper fine-tunes it on ImageNet.

    Attention saves its matrix of probabilities, and there is no dropout, as in the model that the paper starts from.
    """
    import transformers

    with seeded(0):
        size = {"image_size": 384, "num_labels": 1000, "attn_implementation": "eager"}
        config = transformers.ViTConfig(**size | smaller)
        model: nn.Module = transformers.ViTForImageClassification(config).train()
        pictures = torch.randn(batch, 3, config.image_size, config.image_size)
        return model, {"pixel_values": pictures, "labels": torch.randint(0, config.num_labels, (batch,))}


def decoder(batch: int, **smaller: Any) -> tuple[nn.Module, Any]:
    """Return a Llama of GPT-2's size, whose attention saves no matrix of scores, for texts of 256 tokens."""
    import transformers

    size = {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "vocab_size": 8192,
        "max_position_embeddings": 256,
        "attn_implementation": "sdpa",
    }
    with seeded(0):
        config = transformers.LlamaConfig(**size | smaller)
        model: nn.Module = transformers.LlamaForCausalLM(config).train()
        tokens = torch.randint(0, config.vocab_size, (batch, config.max_position_embeddings))
        return model, {"input_ids": tokens, "labels": tokens}


def another(batch: Any, seed: int) -> dict[str, torch.Tensor]:
    """Return a batch of the same form whose content is drawn anew: numbers as `randn` has them, or as large at most."""
    draws = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(t.shape, generator=draws)
        if t.is_floating_point()
        else torch.randint(0, int(t.max()) + 1, t.shape, generator=draws)
        for name, t in batch.items()
    }


MODELS: dict[str, Frozen] = {
    "bert": Frozen("BERT-base, 128 tokens", bert, 4, 32, (3.2, 0.7)),
    "vit": Frozen("ViT-base, 224 pixels", vit, 4, 32, (4.5, 0.9)),
    "vit384": Frozen(
        "ViT-base, 384 pixels",
        vit_large_pictures,
        1,
        128,
        (69.5, 11.9),
        kinds=("fixed8_unit", "int8", "int8_group", "top10"),
        measured=1,
    ),
    "decoder": Frozen("decoder with fused attention, 256 tokens", decoder, 2),
}
"""The models, by the names that commands take."""
