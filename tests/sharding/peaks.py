"""Measure a rank's peak with the allocator's events, beside what the plan predicts.

`python -m tests.sharding.peaks STORES MODEL…` on each rank.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from stowage import shard
from stowage.stages.device import device_of, unique_bytes
from stowage.stages.structure import tensors_of
from stowage.stages.workload.models import build_model
from stowage.stages.workload.samples import sample_batch
from tests.sharding.beside_ddp import STATES, state_of
from tests.sharding.ranks import say

Case = tuple[nn.Module, Any, Any, torch.optim.Optimizer]
"""Model, batch, loss and optimizer."""

_GPT2 = {"n_layer": 4, "n_embd": 256, "n_head": 2, "n_positions": 64, "vocab_size": 512}
_LLAMA = {"hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4,
          "intermediate_size": 512, "max_position_embeddings": 64}  # fmt: skip


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-3)


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


def _hugging_face(
    architecture: str, rows: int, length: int, optimizer: Any = _adamw, **overrides: Any
) -> Callable[[], Case]:
    def build() -> Case:
        model = build_model(architecture, overrides, seed=0)
        return model, sample_batch(model, rows, length, dist.get_rank()), None, optimizer(model)

    return build


def _frozen() -> Case:
    """A GPT-2 whose embeddings and first half are frozen."""
    model, batch, loss, _ = _hugging_face("gpt2", 4, 64, **_GPT2)()
    for module in (model.transformer.wte, model.transformer.wpe, *model.transformer.h[:2]):
        module.requires_grad_(False)
    return model, batch, loss, _adamw(model)


def _lora() -> Case:
    """Adapters on a frozen Llama with an own head."""
    import peft

    model, batch, loss, _ = _hugging_face("llama", 4, 64, vocab_size=1024, **_LLAMA)()
    with torch.random.fork_rng(devices=[]):
        adapted: nn.Module = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    return adapted, batch, loss, _adamw(adapted)


class _Layers(nn.Module):
    """Equal layers and a large last one."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(4))
        self.last = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> Any:
        """Return the classes' numbers."""
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


def _layers(rows: int) -> Callable[[], Case]:
    def build() -> Case:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = _Layers(256, 4096)
        return model, {"x": torch.randn(rows, 256)}, lambda outputs, batch: outputs.square().mean(), _adamw(model)

    return build


CASES: dict[str, Callable[[], Case]] = {
    "gpt2": _hugging_face("gpt2", 4, 64, **_GPT2),
    "gpt2_untied": _hugging_face("gpt2", 4, 64, **_GPT2 | {"vocab_size": 2048, "tie_word_embeddings": False}),
    "gpt2_untied_short": _hugging_face("gpt2", 1, 16, **_GPT2 | {"vocab_size": 4096, "tie_word_embeddings": False}),
    "gpt2_wide": _hugging_face("gpt2", 1, 32, **_GPT2 | {"n_embd": 512, "n_head": 4, "n_positions": 32}),
    "gpt2_frozen": _frozen,
    "llama_untied": _hugging_face("llama", 4, 64, optimizer=_sgd, vocab_size=2048, **_LLAMA),
    "llama_lora": _lora,
    "t5": _hugging_face("t5", 4, 64, d_model=256, d_kv=64, d_ff=512, num_layers=2, num_heads=4, vocab_size=1024),
    "vit": _hugging_face("vit", 4, 1, hidden_size=256, num_hidden_layers=3, num_attention_heads=4, num_labels=4096,
                         intermediate_size=512, image_size=64, patch_size=8),
    "layers_of_many_rows": _layers(1024),
    "layers_of_few_rows": _layers(16),
}  # fmt: skip


STEPS = 3

TWICE = " twice"
"""Marks a case of two micro-batches for each update."""

POLICIES = {
    " in bfloat16": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    " reduced in float32": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
}
"""Mark a case of mixed precision."""


def held(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> list[torch.Tensor]:
    """Return the tensors that are in memory between two steps."""
    states = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
    tensors = [*model.parameters(), *states]
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    return [*local, *model.buffers(), *tensors_of(batch)]


def peak_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, loss_of: Any = None, accumulate: int = 1
) -> int:
    """Return the highest peak of some steps."""

    def step() -> float:
        for _ in range(accumulate):
            outputs = model(**batch)
            loss = outputs.loss if loss_of is None else loss_of(outputs, batch)
            del outputs
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    step()
    step()
    tensors = held(model, optimizer, batch)
    return unique_bytes(tensors) + max(device_of("cpu").measure(step, tensors).peak_bytes for _ in range(STEPS))


def main(stores: Path, names: list[str]) -> None:
    dist.init_process_group("gloo")
    for name in names:
        accumulate = 2 if name.endswith(TWICE) else 1
        mark = next((mark for mark in POLICIES if name.removesuffix(TWICE).endswith(mark)), "")
        for state in STATES:
            model, batch, loss, optimizer = CASES[name.removesuffix(TWICE).removesuffix(mark)]()
            how: dict[str, Any] = {
                "loss": loss,
                "accumulate": accumulate,
                "choices": state_of(state),
                "cache_dir": stores,
            }
            how["mixed_precision"] = POLICIES.get(mark)
            plan = shard(model, batch, optimizer, device_budget="8GiB", **how)
            measured = peak_of(model, optimizer, batch, loss, accumulate)
            say({"case": name, "state": state, "measured": measured, "predicted": plan.predicted_peak_bytes})
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
