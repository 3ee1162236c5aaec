"""Save a sharded model with PyTorch's own checkpoints on some ranks, and load it on others, or in one process.

`python -m tests.sharding.resharded STORES FOLDER save|load` on each rank.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from stowage import shard
from tests.sharding.beside_ddp import content, differences, state_of, train
from tests.sharding.ranks import say
from tests.zoo import ZOO

Made = tuple[nn.Module, torch.optim.Optimizer, Any]


def made() -> Made:
    """Return a model, its optimizer, and a batch."""
    model, batch, _ = ZOO["gpt2"]()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2), batch


def load(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Load what was saved, as PyTorch's documents say."""
    weights, states = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": states}, checkpoint_id=folder / "checkpoint")
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)


def unlike_saved(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> list[str]:
    """Return what is not, bit for bit, as it was whole when it was saved."""
    expected: dict[str, torch.Tensor] = torch.load(folder / "whole.pt", weights_only=True)
    return list(differences(content(model, optimizer), expected))


def main(stores: Path, folder: Path, what: str) -> None:
    dist.init_process_group("gloo")
    model, optimizer, batch = made()
    shard(model, batch, optimizer, device_budget="1GiB", choices=state_of("mixed"), cache_dir=stores)
    if what == "save":
        train(model, optimizer, batch, None, 2)
        weights, states = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder / "checkpoint")
        whole = content(model, optimizer)
        if dist.get_rank() == 0:
            torch.save(whole, folder / "whole.pt")
        dist.barrier()
        say(len(whole))
    else:
        load(model, optimizer, folder)
        say(unlike_saved(model, optimizer, folder))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
