"""Measure a rank's peak with the allocator's events, beside what the plan predicts.

`python -m tests.sharding.peaks STORES MODEL…` on each rank.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from stowage import shard
from stowage.stages.device import device_of, unique_bytes
from stowage.stages.structure import tensors_of
from stowage.stages.workload.models import build_model
from stowage.stages.workload.samples import sample_batch
from tests.sharding.beside_ddp import STATES, state_of
from tests.sharding.ranks import say

SIZES: dict[str, tuple[str, dict[str, Any], int, int]] = {
    "gpt2": ("gpt2", {"n_layer": 4, "n_embd": 256, "n_head": 2, "n_positions": 64, "vocab_size": 512}, 4, 64),
    "gpt2_untied": (
        "gpt2",
        {"n_layer": 4, "n_embd": 256, "n_head": 2, "n_positions": 64, "vocab_size": 2048, "tie_word_embeddings": False},
        4,
        64,
    ),
    "gpt2_wide": ("gpt2", {"n_layer": 4, "n_embd": 512, "n_head": 4, "n_positions": 32, "vocab_size": 512}, 1, 32),
}


STEPS = 3


def held(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> list[torch.Tensor]:
    """Return the tensors that are in memory between two steps."""
    states = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
    tensors = [*model.parameters(), *states]
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    return [*local, *model.buffers(), *tensors_of(batch)]


def peak_of(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> int:
    """Return the highest peak of some steps."""

    def step() -> float:
        loss = model(**batch).loss
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
        architecture, overrides, rows, length = SIZES[name]
        for state in STATES:
            model = build_model(architecture, overrides, seed=0)
            batch = sample_batch(model, rows, length, dist.get_rank())
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            plan = shard(model, batch, optimizer, device_budget="8GiB", choices=state_of(state), cache_dir=stores)
            measured = peak_of(model, optimizer, batch)
            say({"case": name, "state": state, "measured": measured, "predicted": plan.predicted_peak_bytes})
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
