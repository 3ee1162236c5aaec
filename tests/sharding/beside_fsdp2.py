"""Train models under plain FSDP2 with a policy of mixed precision, and sharded with the same one, on the same batches.

Plain FSDP2 is `fully_shard` of each block and of the model, whose outputs alone are cast to `output_dtype`. Run on
ranks with `on_ranks`, or in one process.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from stowage import shard
from stowage.stages.workload.repeated import containers
from tests.sharding.beside_ddp import MODELS, STATES, content, differences, state_of, varied

ITERATIONS = 5

POLICIES = {
    "bfloat16": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    "reduced in float32": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    "outputs in float32": MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32
    ),
    "reduced in bfloat16 alone": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16),
}

Trained = tuple[list[float], dict[str, torch.Tensor]]
"""Losses, and parameters, states and buffers, whole."""


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, loss: Any, accumulate: int) -> Trained:
    """Train on this rank's own batches, with this rank's own random numbers."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(100 + rank)
    losses = []
    for i in range(ITERATIONS):
        optimizer.zero_grad()
        for part in range(accumulate):
            given = varied(batch, 1000 * i + 10 * part + rank)
            outputs = model(**given)
            value = outputs.loss if loss is None else loss(outputs, given)
            (value / accumulate).backward()
            losses.append(value.item())
        optimizer.step()
    return losses, content(model, optimizer)


def plain_fsdp2(name: str, policy: MixedPrecisionPolicy, accumulate: int = 1) -> Trained:
    """Train under plain FSDP2."""
    model, batch, loss = MODELS[name]()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for container in containers(model).values():
        for block in container.children():
            fully_shard(block, mesh=mesh, mp_policy=replace(policy, output_dtype=None))
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return train(model, adamw(model), batch, loss, accumulate)


def sharded(name: str, policy: MixedPrecisionPolicy, state: str, stores: Path, accumulate: int = 1) -> Trained:
    """Train a model that `shard` has sharded, with the same policy."""
    model, batch, loss = MODELS[name]()
    optimizer = adamw(model)
    shard(
        model,
        batch,
        optimizer,
        device_budget="1GiB",
        loss=loss,
        accumulate=accumulate,
        choices=state_of(state),
        mixed_precision=policy,
        cache_dir=stores,
    )
    return train(model, optimizer, batch, loss, accumulate)


def compared(name: str, policy: str, stores: Path, accumulate: int = 1) -> dict[str, Any]:
    """Return for each state whether the losses are equal, and the differences of what was trained."""
    losses, expected = plain_fsdp2(name, POLICIES[policy], accumulate)
    found = {}
    for state in STATES:
        ours, trained = sharded(name, POLICIES[policy], state, stores, accumulate)
        found[state] = (ours == losses, differences(trained, expected))
    return found


def compared_all(cases: list[tuple[str, str, int]], stores: Path) -> list[dict[str, Any]]:
    """Compare each case of a model, a policy and a number of micro-batches."""
    return [compared(name, policy, stores, accumulate) for name, policy, accumulate in cases]
