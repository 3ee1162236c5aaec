"""Models of pictures and of speech."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from tests.api.beside_plain import Script, trains_equally
from tests.matrix import some
from tests.recipes.tiny import NARROW, VOCABULARY, its_loss, trainable

PICTURE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}


def whisper() -> Script:
    """Speech to text: encoder, decoder, dropout; without SpecAugment, as is its default."""
    config = transformers.WhisperConfig(
        vocab_size=VOCABULARY,
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        num_mel_bins=8,
        max_source_positions=24,
        max_target_positions=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        dropout=0.1,
    )
    model = transformers.WhisperForConditionalGeneration(config)
    batches = [
        {"input_features": torch.randn(4, 8, 48), "labels": torch.randint(3, VOCABULARY, (4, 10))} for _ in range(3)
    ]
    return Script(model, trainable(model), its_loss, batches)


def clip() -> Script:
    """Pictures beside texts, contrasted."""
    text = {k: v for k, v in NARROW.items() if k != "num_key_value_heads"} | {"eos_token_id": 63}
    config = transformers.CLIPConfig(text_config=text, vision_config=PICTURE, projection_dim=16)
    model = transformers.CLIPModel(config)
    batches = []
    for _ in range(3):
        tokens = torch.randint(3, VOCABULARY - 1, (6, 12))
        tokens[:, -1] = 63
        batches.append({"input_ids": tokens, "pixel_values": torch.randn(6, 3, 16, 16), "return_loss": True})
    return Script(model, trainable(model, 1e-3), its_loss, batches)


def _llava(kind: str = "llama", **more: Any) -> nn.Module:
    config = transformers.LlavaConfig(
        vision_config={"model_type": "clip_vision_model", **PICTURE},
        text_config={"model_type": kind, **NARROW, **more},
        image_token_id=3,
        image_seq_length=4,
        vision_feature_layer=-1,
    )
    model: nn.Module = transformers.LlavaForConditionalGeneration(config)
    return model


def _shown() -> list[dict[str, torch.Tensor]]:
    batches = []
    for _ in range(3):
        tokens = torch.randint(4, VOCABULARY, (4, 12))
        tokens[:, 1:5] = 3  # four patches of a picture
        labels = tokens.masked_fill(tokens == 3, -100)
        pictures = torch.randn(4, 3, 16, 16)
        mask = torch.ones_like(tokens)
        batches.append({"input_ids": tokens, "attention_mask": mask, "pixel_values": pictures, "labels": labels})
    return batches


def llava() -> Script:
    """Pictures put among the embeddings of a text."""
    model = _llava()
    return Script(model, trainable(model), its_loss, _shown())


def llava_with_frozen_eyes() -> Script:
    """As it is usually tuned."""
    model = _llava()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("vision_tower" not in name)
    return Script(model, trainable(model), its_loss, _shown())


class Contrast(nn.Module):
    """MoCo: an encoder, another that follows it, a queue of keys."""

    def __init__(self, size: int = 32, width: int = 8) -> None:
        super().__init__()
        self.encoder, self.follower = (
            nn.Sequential(
                nn.Conv2d(3, 8, 3, padding=1),
                nn.BatchNorm2d(8),
                nn.ReLU(),
                nn.AdaptiveAvgPool2d(2),
                nn.Flatten(),
                nn.Linear(32, width),
            )
            for _ in range(2)
        )
        self.follower.load_state_dict(self.encoder.state_dict())
        self.follower.requires_grad_(False)
        self.register_buffer("queue", nn.functional.normalize(torch.randn(width, size), dim=0))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))
        self.queue: torch.Tensor
        self.place: torch.Tensor

    @torch.no_grad()
    def _follow(self) -> None:
        for mine, its in zip(self.follower.parameters(), self.encoder.parameters()):
            mine.data = mine.data * 0.99 + its.data * 0.01

    @torch.no_grad()
    def _enqueue(self, keys: torch.Tensor) -> None:
        rows = keys.shape[0]
        place = int(self.place)
        self.queue[:, place : place + rows] = keys.T
        self.place[0] = (place + rows) % self.queue.shape[1]

    def forward(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        queries = nn.functional.normalize(self.encoder(one), dim=1)
        with torch.no_grad():
            self._follow()
            order = torch.randperm(other.shape[0])
            keys = nn.functional.normalize(self.follower(other[order]), dim=1)[torch.argsort(order)]
        positive = (queries * keys).sum(1, keepdim=True)
        logits = torch.cat([positive, queries @ self.queue.clone().detach()], dim=1) / 0.07
        self._enqueue(keys)
        return nn.functional.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))


class ContrastInPlace(Contrast):
    """The same, in place and with the place in the queue as a tensor."""

    @torch.no_grad()
    def _follow(self) -> None:
        for mine, its in zip(self.follower.parameters(), self.encoder.parameters()):
            mine.mul_(0.99).add_(its, alpha=0.01)

    @torch.no_grad()
    def _enqueue(self, keys: torch.Tensor) -> None:
        rows = keys.shape[0]
        places = (self.place + torch.arange(rows)) % self.queue.shape[1]
        self.queue.index_copy_(1, places, keys.T)
        self.place.add_(rows).remainder_(self.queue.shape[1])


def _contrasted(kind: Callable[[], nn.Module]) -> Script:
    model = kind()
    batches = [(torch.randn(8, 3, 12, 12), torch.randn(8, 3, 12, 12)) for _ in range(6)]
    return Script(model, trainable(model), lambda outputs, _: outputs, batches)


def moco() -> Script:
    """See `ContrastInPlace`."""
    return _contrasted(ContrastInPlace)


RECIPES: dict[str, Callable[[], Script]] = {
    "Whisper": whisper,
    "CLIP": clip,
    "LLaVA": llava,
    "LLaVA, frozen eyes": llava_with_frozen_eyes,
    "MoCo": moco,
}


@pytest.mark.parametrize("recipe", some(RECIPES, ["MoCo"]))
def test_with_defaults(recipe: str, fit_stores: Path) -> None:
    trains_equally(RECIPES[recipe], "100%", cache_dir=fit_stores)
