"""A Trainer on each rank: plain, under plans, and resumed; run by `test_stowed_trainer`.

`python -m tests.sharding.stowed_trainer FOLDER` on each rank.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from stowage import stow
from stowage.stages.ir.errors import ParameterError
from tests.sharding.ranks import say


def trainer_in(folder: Path, **arguments: Any) -> Trainer:
    """A Trainer of a tiny GPT-2 with dropout, that saves every second step."""
    set_seed(0)
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 64, "n_positions": 32}
    model = GPT2LMHeadModel(GPT2Config(bos_token_id=0, eos_token_id=0, **sizes))
    ids = torch.randint(0, 64, (24, 16), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": row, "labels": row} for row in ids]
    given: dict[str, Any] = {
        "per_device_train_batch_size": 2,
        "max_steps": 5,
        "logging_steps": 1,
        "save_steps": 2,
        "learning_rate": 1e-2,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "ddp_backend": "gloo",
    }
    return Trainer(model, TrainingArguments(str(folder), **(given | arguments)), train_dataset=data, eval_dataset=data)


def losses(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def refused(trainer: Trainer) -> str:
    try:
        stow(trainer, device_budget="70%")
    except ParameterError as error:
        return str(error)
    return ""


def main(folder: Path) -> None:
    how: dict[str, Any] = {"device_budget": "70%", "quick": True, "cache_dir": folder / "stores"}
    plain = trainer_in(folder / "plain")
    plain.train()
    stowed = stow(trainer_in(folder / "stowed"), **how)
    stowed.train()
    dist.barrier()
    again = stow(trainer_in(folder / "again"), **how)
    again.train(resume_from_checkpoint=str(folder / "stowed" / "checkpoint-2"))
    say(
        {
            "plain": losses(plain),
            "stowed": losses(stowed),
            "again": losses(again),
            "within": stowed.stowage.plan.device_peak_bytes <= stowed.stowage.plan.device_budget_bytes,
            "gathers": any(row.action == "gather" for row in stowed.stowage.step.planned.rows),
            "refused": refused(trainer_in(folder / "other", eval_strategy="steps")),
        }
    )
    dist.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
