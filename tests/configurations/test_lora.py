"""LoRA by `peft`: a module with a frozen base."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stowage.flows import fit
from tests.configurations.alongside import Plain, assert_equal, assert_measured, batches, small_gpt2
from tests.matrix import some

peft = pytest.importorskip("peft", reason="peft is not installed")


def lora() -> nn.Module:
    """Adapters on attention, with dropout; B starts at zero in LoRA, here it does not, so that A moves at once."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        settings = peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["c_attn", "c_proj"])
        model: nn.Module = peft.get_peft_model(small_gpt2(), settings)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.02)
    return model


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


@pytest.mark.parametrize("accumulate", some([1, 2], keep=[2]))
def test_equal_to_eager(accumulate: int, fit_stores: Path) -> None:
    model, other = lora(), lora()
    given = batches(model, 5 * accumulate)
    step = fit(
        model,
        given[0],
        adamw,
        device_budget="80%",
        accumulate=accumulate,
        max_grad_norm=0.5,
        cache_dir=fit_stores,
        quick=True,
        say=lambda text: None,
    )
    plain = Plain(other, adamw(other.parameters()), max_grad_norm=0.5)
    assert_equal(step, plain, given, [(i + 1) % accumulate == 0 for i in range(len(given))])
    for i in range(accumulate):
        assert_measured(step, given[0], update=i == accumulate - 1)
    assert step.plan.recomputed_bytes > 0 or accumulate > 1
    assert all("lora" in s.name for s in step.planned.trace.storages if s.role in ("state", "gradient"))
    assert all(p.grad is None for p in model.parameters())
