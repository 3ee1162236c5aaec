"""Ranks save adapters as `save_pretrained` of peft does, also those that do not train and what else peft writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from stowage.flows import fit
from tests.sharding.processes import on_ranks

SIZES = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
    "intermediate_size": 16, "max_position_embeddings": 16, "vocab_size": 32,
}  # fmt: skip
WEIGHTS = "adapter_model.safetensors"


def _model() -> Any:
    torch.manual_seed(0)
    whole = LlamaForCausalLM(LlamaConfig(**SIZES))
    chosen = LoraConfig(r=2, target_modules=["q_proj", "embed_tokens"], modules_to_save=["lm_head"])
    model: Any = get_peft_model(whole, chosen)
    model.add_adapter("other", LoraConfig(r=2, target_modules=["v_proj"]))
    model.set_adapter("default")
    return model.train()


def _saved(stores: Path, folder: Path) -> tuple[bool, str]:
    model = _model()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    ids = torch.arange(8).view(1, 8) + dist.get_rank()
    step = fit(
        model, {"input_ids": ids, "labels": ids}, optimizer, device_budget="1GiB", group=dist.group.WORLD, quick=True,
        cache_dir=stores, say=lambda text: None,
    )  # fmt: skip
    step({"input_ids": ids, "labels": ids})
    step.save_pretrained(folder / "ranks")
    (folder / "file").touch()
    with pytest.raises(Exception, match="Not a directory") as failure:
        step.save_pretrained(folder / "file" / "in it")
    same = True
    with step.on_device():
        if dist.get_rank() == 0:
            model.save_pretrained(folder / "plain")
            for place in (WEIGHTS, f"other/{WEIGHTS}"):
                found, expected = load_file(folder / "ranks" / place), load_file(folder / "plain" / place)
                same &= found.keys() == expected.keys() and all(torch.equal(found[k], expected[k]) for k in expected)
    step({"input_ids": ids, "labels": ids})
    return same, str(failure.value)


def test_what_peft_writes(fit_stores: Path, tmp_path: Path) -> None:
    first, second = on_ranks(2, _saved, fit_stores, tmp_path)
    assert first[0]
    names = set(load_file(tmp_path / "ranks" / WEIGHTS))
    assert {n.rpartition("model.")[2] for n in names} >= {"lm_head.weight", "embed_tokens.base_layer.weight"}
    assert second[1].startswith("Rank 0 failed: NotADirectoryError")
