"""Train a model that `shard` has sharded, until one rank is killed or hangs, and save on the way as PyTorch does.

`python -m tests.sharding.failing_shard FOLDER TIMEOUT HOW AT WHERE` on each rank; see `failing`.
"""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from stowage import shard
from stowage.stages.runtime.fsdp.gloo import GlooAllGather, GlooReduceScatter
from stowage.stages.runtime.sharding.ranks import Ranks
from tests.sharding.beside_ddp import state_of
from tests.sharding.ended import failing_rank
from tests.sharding.failing import Failing
from tests.sharding.ranks import say

STEPS, EVERY = 5, 2

COLLECTIVES: dict[str, tuple[type, str]] = {
    "scatter": (GlooReduceScatter, "reduce"),
    "gather": (GlooAllGather, "gather"),
    "buffer": (Ranks, "broadcast"),
}
"""What is replaced to fail there."""


class Layers(nn.Module):
    """Layers that are groups of their own, and buffers, which the loss depends on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 33)
        self.norm = nn.BatchNorm1d(33)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(33, 33), nn.Tanh()) for _ in range(3))
        self.last = nn.Linear(33, 1)

    def forward(self, x: torch.Tensor) -> Any:
        """Return one number for each row."""
        first = self.first(x)
        hidden = self.norm(first) + (first - self.norm.running_mean).tanh()
        for block in self.blocks:
            hidden = block(hidden)
        return self.last(hidden)


def save(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, iteration: int) -> None:
    weights, states = get_state_dict(model, optimizer)
    first = dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=True)  # rank 0's buffers
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder / f"checkpoint-{iteration}", planner=first)
    if dist.get_rank() == 0:
        (folder / "iteration").write_text(str(iteration))


def resumed(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> int:
    """Go on from what was saved last, and return the iteration that is the next."""
    if not (folder / "iteration").exists():
        return 0
    iteration = int((folder / "iteration").read_text())
    weights, states = get_state_dict(model, optimizer)
    found = {"model": weights, "optimizer": states}
    dcp.load(found, checkpoint_id=folder / f"checkpoint-{iteration}")
    set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
    return iteration


def main(folder: Path, timeout_s: float, how: str, at: int, where: str) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    group = dist.new_group(timeout=timedelta(seconds=timeout_s)) if timeout_s else None
    model = Layers()

    def batch_at(i: int) -> dict[str, torch.Tensor]:
        return {"x": torch.randn(8, 6, generator=torch.Generator().manual_seed(10 * i + rank))}

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def loss_of(outputs: torch.Tensor, _batch: Any) -> torch.Tensor:
        return outputs.square().mean()

    choices = state_of("device, reshard")
    shard(
        model, batch_at(0), optimizer, device_budget="1GiB", loss=loss_of, group=group, choices=choices,
        cache_dir=folder,
    )  # fmt: skip
    failing = Failing(how, at)
    if rank == failing_rank(where, ranks):
        failing.install(*COLLECTIVES[where])

    def step(i: int) -> float:
        batch = batch_at(i)
        loss = loss_of(model(**batch), batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    for i in range(resumed(model, optimizer, folder), STEPS):
        failing.iteration = i
        try:
            say({"iteration": i, "loss": step(i)})
        except Exception as error:
            again = ""
            try:
                step(i)
            except Exception as second:
                again = f"{type(second).__name__}: {second}"
            say({"error": type(error).__name__, "text": str(error), "at": time.time(), "again": again})
            raise
        if (i + 1) % EVERY == 0:
            save(model, optimizer, folder, i + 1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3], int(sys.argv[4]), sys.argv[5])
