"""peft's ways on language models of transformers, with their defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.api.beside_plain import Make, Script, trains_equally
from tests.matrix import some
from tests.recipes.tiny import EXPERTS, LANGUAGE, its_loss, language_model, texts, trainable

peft = pytest.importorskip("peft", reason="peft is not installed")
LINEAR = {"lora_dropout": 0.05, "target_modules": "all-linear"}
WAYS: dict[str, Any] = {
    "LoRA": lambda: peft.LoraConfig(task_type="CAUSAL_LM", r=4, **LINEAR),
    "LoRA of attention": lambda: peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_dropout=0.05),
    "DoRA": lambda: peft.LoraConfig(task_type="CAUSAL_LM", r=4, use_dora=True, **LINEAR),
    "prompt tuning": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    "prefix tuning": lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    "IA3": lambda: peft.IA3Config(task_type="CAUSAL_LM"),
}
DEEPER = ("LoRA", "DoRA")
"""Ways whose gradients skip blocks."""


def script(kind: str, way: str) -> Make:
    """A user's."""

    def make() -> Script:
        settings = WAYS[way]()
        if kind in EXPERTS and way in DEEPER:  # peft adapts experts without dropout alone
            settings.lora_dropout = 0.0
        if kind in EXPERTS and way in ("LoRA of attention", "IA3"):  # peft has no defaults for them
            settings.target_modules = {"q_proj", "v_proj"}
            if way == "IA3":
                settings.feedforward_modules = set()
        model = peft.get_peft_model(
            language_model(kind, attention_dropout=0.1, num_hidden_layers=1 + (way in DEEPER)), settings
        )
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # zero in the beginning: A would not move
                torch.nn.init.normal_(parameter, std=0.02)
        return Script(model, trainable(model), its_loss, texts(), seen=lambda: None)

    return make


CASES = [(kind, way) for kind in LANGUAGE for way in WAYS if kind not in EXPERTS or way != "DoRA"]


@pytest.mark.parametrize(("kind", "way"), some(CASES, [("Llama", "LoRA")]))
def test_with_defaults(kind: str, way: str, fit_stores: Path) -> None:
    trains_equally(script(kind, way), "90%", cache_dir=fit_stores)
