"""Profiles OPT-175B from a trace, without its weights in memory."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from transformers import OPTConfig, OPTForCausalLM

from stowage.flows.api.sharding.profile import profile_groups
from stowage.stages.device.cards import card_named
from stowage.stages.ir.parallel import ParameterGroup

TOKENS = 2048
"""Tokens of the one sequence that each GPU has."""


def opt_175b() -> OPTForCausalLM:
    """Build OPT-175B without memory for its weights."""
    config = OPTConfig(
        num_hidden_layers=96,
        hidden_size=12288,
        ffn_dim=49152,
        num_attention_heads=96,
        word_embed_proj_dim=12288,
        max_position_embeddings=2048,
        use_cache=False,
    )
    with torch.device("meta"):
        model = OPTForCausalLM(config).train()
    model.gradient_checkpointing_enable()
    return model


def traced_groups(model: OPTForCausalLM, card: str = "a100-80gb") -> tuple[ParameterGroup, ...]:
    """Trace a step of a model with checkpointed layers on a card, and return its groups, gathered in half precision."""
    ids = torch.zeros(1, TOKENS, dtype=torch.int64)
    with tempfile.TemporaryDirectory() as stores:
        profile = profile_groups(
            model,
            {"input_ids": ids, "labels": ids},
            stores=Path(stores),
            optimizer=torch.optim.AdamW(model.parameters()),
            target=card_named(card).described("bfloat16"),
        )
    return tuple(replace(g, compute_bytes=2) for g in profile.groups)
