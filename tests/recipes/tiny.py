"""Models of transformers, as their configurations come, with few and narrow layers and random weights."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn

VOCABULARY = 64
NARROW: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8},
}
OTHER: dict[str, dict[str, Any]] = {"Gemma3": {"head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8}}
LANGUAGE = ["Llama", "Qwen2", "Gemma3", "Phi", "Mixtral", "Qwen3Moe"]


def language_model(kind: str, **more: Any) -> nn.Module:
    """`{kind}ForCausalLM`."""
    text = f"{kind}Text" if kind == "Gemma3" else kind
    config = getattr(transformers, f"{text}Config")(**NARROW | EXPERTS.get(kind, {}) | OTHER.get(kind, {}) | more)
    model: nn.Module = getattr(transformers, f"{kind}ForCausalLM")(config)
    return model


def texts(count: int = 3, rows: int = 6, length: int = 16, padded: bool = True) -> list[dict[str, torch.Tensor]]:
    """Batches of tokens, some rows with padding."""
    found = []
    for _ in range(count):
        tokens = torch.randint(3, VOCABULARY, (rows, length))
        mask = torch.ones(rows, length, dtype=torch.long)
        if padded:
            mask[0, length - 3 :] = 0
        labels = tokens.masked_fill(mask == 0, -100)
        found.append({"input_ids": tokens, "attention_mask": mask, "labels": labels})
    return found


def its_loss(outputs: Any, _batch: Any) -> torch.Tensor:
    """What models of transformers return with labels."""
    loss: torch.Tensor = outputs.loss
    return loss


def trainable(model: nn.Module, rate: float = 1e-2) -> torch.optim.Optimizer:
    """AdamW of what trains."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate)
