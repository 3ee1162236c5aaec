"""Masks that mask nothing, positions of one sequence a row: libraries call other kernels then, and so does a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.api.beside_plain import Script, trains_equally
from tests.matrix import some
from tests.recipes.tiny import NARROW, its_loss, language_model, texts, trainable


def _bert() -> Any:
    taken = {k: v for k, v in NARROW.items() if k not in ("num_key_value_heads", "bos_token_id", "eos_token_id")}
    return transformers.BertForMaskedLM(transformers.BertConfig(**taken | {"num_hidden_layers": 1}))


def masked(kind: str) -> Script:
    """Without padding, with it, and again."""
    model = _bert() if kind == "Bert" else language_model(kind, num_hidden_layers=1)
    batches = [texts(1, padded=padded)[0] for padded in (False, True, False, True)]
    return Script(model, trainable(model), its_loss, batches)


def packed(kind: str) -> Script:
    """One sequence a row, two, and again."""
    model = language_model(kind, num_hidden_layers=1)
    batches = []
    for count in (1, 2, 1, 2):
        batch = texts(1, padded=False)[0]
        del batch["attention_mask"]
        rows, length = batch["input_ids"].shape
        batch["position_ids"] = (torch.arange(length) % (length // count)).repeat(rows, 1)
        batches.append(batch)
    return Script(model, trainable(model), its_loss, batches)


CASES = [("Llama", masked), ("Bert", masked), ("Qwen2", packed)]


@pytest.mark.parametrize(("kind", "recipe"), some(CASES, [("Llama", masked)]))
def test_both_in_one_run(kind: str, recipe: Any, fit_stores: Path) -> None:
    trains_equally(lambda: recipe(kind), "120%", cache_dir=fit_stores)
