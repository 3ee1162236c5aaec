"""LoRA with offloading: adapters by `peft` on language models whose frozen base lives on disk, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stowage.stages.device.tiers import DiskTier
from stowage.stages.solve import eager_peak_bytes
from stowage.stages.workload.models import build_model
from stowage.stages.workload.randomness import seeded
from stowage.stages.workload.samples import sample_batch
from tests.matrix import some
from tests.offload.with_lower_tier import assert_equal_with_lower_tier, solve_with_lower_tier
from tests.runtime.beside_eager import prepare
from tests.zoo import Entry

peft = pytest.importorskip("peft", reason="peft is not installed")

WIDTH, VOCAB = 256, 128
GPT2 = {"n_layer": 2, "n_embd": WIDTH, "n_head": 4, "n_positions": 32, "vocab_size": VOCAB}
LLAMA = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 512,
    "max_position_embeddings": 32,
    "vocab_size": VOCAB,
}
BLOOM = {"hidden_size": WIDTH, "n_layer": 2, "n_head": 4, "vocab_size": VOCAB}

MODELS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "gpt2": (GPT2, ["c_attn", "c_proj"]),
    "llama": (LLAMA, ["q_proj", "v_proj", "down_proj"]),
    "phi": (LLAMA, ["q_proj", "v_proj", "fc2"]),
    "bloom": (BLOOM, ["query_key_value", "dense_4h_to_h"]),
    "mistral": (LLAMA, ["q_proj", "v_proj", "down_proj"]),
}


def lora(architecture: str) -> Callable[[], Entry]:
    """Builds the same model each time. B starts at zero in LoRA; here it does not, so that A moves at once."""

    def build() -> Entry:
        overrides, targets = MODELS[architecture]
        with seeded(1):
            settings = peft.LoraConfig(r=8, lora_alpha=16, lora_dropout=0.1, target_modules=targets)
            model: nn.Module = peft.get_peft_model(build_model(architecture, overrides, seed=0), settings)
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    nn.init.normal_(parameter, std=0.02)
        return model, sample_batch(model, 2, 16, 1), None

    return build


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


@pytest.mark.parametrize("name", some(MODELS, keep=["llama"]))
def test_equal_to_eager_from_disk(name: str, tmp_path: Path) -> None:
    build = lora(name)
    prepared = prepare(build, adamw)
    solved = solve_with_lower_tier(prepared, int(0.4 * eager_peak_bytes(prepared.trace, prepared.nodes)))
    model, _, _ = build()
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    base = {s.name for s in solved.slots if s.role == "parameter"} - trained
    matrices = {n for n, p in model.named_parameters() if "base_layer.weight" in n and p.dim() > 1}
    away = {s.storage: s.name for s in solved.slots if s.name in base}
    ups = [away[r.storage] for r in solved.rows if r.action == "reload" and r.storage in away]
    downs = [away[r.storage] for r in solved.rows if r.action == "free" and r.storage in away]
    assert set(ups) == set(downs) == base, "what leaves comes back"
    assert len(base & matrices) >= len(matrices) / 2, "the frozen base is offloaded"
    assert any(ups.count(n) > 1 for n in matrices), "between forward and backward too"
    assert not any(r.action == "offload" and r.storage in away for r in solved.rows), "it is never written again"
    assert all(s.name.partition("::")[0] in trained for s in solved.slots if s.role == "state")
    tier = DiskTier(tmp_path)
    assert_equal_with_lower_tier(build, prepared, solved, tier, adamw, moves=trained)
    tier.close()
