"""Train with the Hugging Face Trainer, under DDP and sharded.

`python -m tests.sharding.in_trainer STORES FOLDER` on each rank.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainingArguments

from stowage import shard
from tests.sharding.beside_ddp import state_of
from tests.sharding.ranks import say
from tests.zoo import LENGTH, VOCAB, ZOO


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


def trained(folder: Path, stores: Path, *, sharded: bool, accumulate: int) -> dict[str, Any]:
    args = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=accumulate,
        max_steps=4,
        max_grad_norm=0.0,
        learning_rate=1e-2,
        logging_steps=1,
        save_steps=4,
        save_only_model=True,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=0,
    )
    model, batch, _ = ZOO["gpt2"]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if sharded:
        shard(model, batch, optimizer, device_budget="1GiB", choices=state_of("mixed"), cache_dir=stores)
    trainer = Trainer(model, args, train_dataset=Tokens(), optimizers=(optimizer, None))
    trainer.train()
    weights = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return {
        "losses": [row["loss"] for row in trainer.state.log_history if "loss" in row],
        "sums": [float(w.detach().double().sum()) for w in weights],
        "wrapped": type(trainer.model_wrapped).__name__,
        "saved": (folder / "checkpoint-4" / "model.safetensors").exists(),
    }


def main(stores: Path, folder: Path) -> None:
    for accumulate in (1, 2):
        found = [
            trained(folder / f"{accumulate}{sharded}", stores, sharded=sharded, accumulate=accumulate)
            for sharded in (False, True)
        ]
        dist.barrier()
        say({"accumulate": accumulate, "ddp": found[0], "sharded": found[1]})
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
