"""Outputs that transformers collects with hooks it installs when they are first asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.api.beside_plain import Script, equal, plainly, planned
from tests.matrix import some
from tests.recipes.tiny import language_model, texts, trainable


def _hidden(outputs: Any, _batch: Any) -> torch.Tensor:
    value: torch.Tensor = outputs.loss + sum(h.pow(2).mean() for h in outputs.hidden_states)
    return value


def _attended(outputs: Any, _batch: Any) -> torch.Tensor:
    value: torch.Tensor = outputs.loss + sum(a.pow(2).mean() for a in outputs.attentions)
    return value


def _routed(outputs: Any, _batch: Any) -> torch.Tensor:
    assert outputs.router_logits is not None
    value: torch.Tensor = outputs.loss + sum(r.logsumexp(-1).pow(2).mean() for r in outputs.router_logits)
    return value


CASES: dict[str, tuple[str, dict[str, Any], Any]] = {
    "hidden states": ("Llama", {"output_hidden_states": True}, _hidden),
    "hidden states of Gemma3": ("Gemma3", {"output_hidden_states": True}, _hidden),
    "attentions": ("Llama", {"output_attentions": True, "attn_implementation": "eager"}, _attended),
    "router logits": ("Mixtral", {"output_router_logits": True}, _routed),
    "router logits of Qwen3Moe": ("Qwen3Moe", {"output_router_logits": True}, _routed),
}


def everything_on(model: nn.Module) -> dict[str, list[str]]:
    """What its modules hold, hooks included."""
    return {
        name: sorted(vars(m)) + [f"{k}: {len(v)}" for k, v in vars(m).items() if k.endswith("_hooks")]
        for name, m in model.named_modules()
    }


@pytest.mark.parametrize("case", some(CASES, ["hidden states"]))
def test_asked_for(case: str, fit_stores: Path) -> None:
    kind, asked, loss = CASES[case]
    models: list[nn.Module] = []

    def make() -> Script:
        model = language_model(kind, num_hidden_layers=2, **asked)
        models.append(model)
        return Script(model, trainable(model), loss, texts(), seen=lambda: everything_on(model))

    untouched = everything_on(language_model(kind, **asked))
    mine, _ = planned(make, "90%", cache_dir=fit_stores)
    theirs = plainly(make)
    found, plain = mine.pop("seen"), theirs.pop("seen")
    assert all(equal(mine[name], theirs[name]) for name in theirs)
    assert found in (untouched, plain)
