"""What users start on several processes: a Trainer under `stow`, one of a model that is sharded, a loop of their own.

`python -m tests.sharding.launched WHAT STORES FOLDER [ALONE]` on each rank; with ALONE, only what Stowage trains.
Each rank writes what it has found to FOLDER/WHAT-RANK.json.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from stowage import shard, stow
from tests.sharding.beside_ddp import state_of, train
from tests.sharding.in_trainer import trained
from tests.sharding.stowed_trainer import gathers, logged, trainer_in
from tests.zoo import ZOO


def stowed(stores: Path, folder: Path, ours: bool) -> dict[str, Any]:
    trainer = trainer_in(folder / f"stow-{ours}", eval_strategy="no", save_strategy="no", load_best_model_at_end=False)
    if ours:
        stow(trainer, device_budget="70%", quick=True, cache_dir=stores)
    trainer.train()
    return {"losses": logged(trainer, "loss"), "gathers": ours and gathers(trainer)}


def in_a_trainer(stores: Path, folder: Path, ours: bool) -> dict[str, Any]:
    found = trained(folder / f"shard-{ours}", stores, sharded=ours, accumulate=1)
    return {name: found[name] for name in ("losses", "sums", "wrapped")}


def in_a_loop(stores: Path, folder: Path, ours: bool) -> dict[str, Any]:
    PartialState(cpu=True, backend="gloo")  # starts the process group
    model, batch, _ = ZOO["gpt2"]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if ours:
        shard(model, batch, optimizer, device_budget="1GiB", choices=state_of("mixed"), cache_dir=stores)
    losses = train(model if ours else DistributedDataParallel(model), optimizer, batch, None)
    weights = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return {"losses": losses, "sums": [float(w.detach().double().sum()) for w in weights]}


WAYS: dict[str, Callable[[Path, Path, bool], dict[str, Any]]] = {
    "stow": stowed,
    "trainer": in_a_trainer,
    "loop": in_a_loop,
}


def main(what: str, stores: Path, folder: Path, alone: bool) -> None:
    found = {name: WAYS[what](stores, folder, name == "ours") for name in (["ours"] if alone else ["ddp", "ours"])}
    dist.barrier()
    (folder / f"{what}-{dist.get_rank()}.json").write_text(json.dumps({"ranks": dist.get_world_size(), **found}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), len(sys.argv) > 4)
