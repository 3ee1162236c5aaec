"""A Trainer on each rank: plain, under plans, and resumed, evaluating on the way; run by `test_stowed_trainer`.

`python -m tests.sharding.stowed_trainer FOLDER` on each rank.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import EvalPrediction, GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from stowage import stow
from stowage.stages.ir.collectives import GATHER
from stowage.stages.ir.errors import ParameterError
from tests.sharding.ranks import say

EVALUATED = 11
"""Samples to evaluate: the last batches of the two ranks are not full."""


def trainer_in(folder: Path, **arguments: Any) -> Trainer:
    """A Trainer of a tiny GPT-2 with dropout, that saves every second step."""
    set_seed(0)
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 64, "n_positions": 32}
    model = GPT2LMHeadModel(GPT2Config(bos_token_id=0, eos_token_id=0, **sizes))
    ids = torch.randint(0, 64, (24, 16), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": row, "labels": row} for row in ids]
    given: dict[str, Any] = {
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "max_steps": 5,
        "logging_steps": 1,
        "save_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "load_best_model_at_end": True,
        "learning_rate": 1e-2,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "ddp_backend": "gloo",
    }
    return Trainer(
        model,
        TrainingArguments(str(folder), **(given | arguments)),
        train_dataset=data,
        eval_dataset=data[:EVALUATED],
        compute_metrics=accuracy,
    )


def accuracy(evaluated: EvalPrediction) -> dict[str, float]:
    logits, labels = torch.as_tensor(evaluated.predictions), torch.as_tensor(evaluated.label_ids)
    return {"right": float((logits.argmax(-1) == labels).double().mean()), "sum": float(logits.double().sum())}


def logged(trainer: Trainer, *names: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history for name in names if name in entry]


def seen(trainer: Trainer) -> dict[str, Any]:
    """What it has logged of training and of evaluation, and what an evaluation after training gives."""
    last = trainer.evaluate()
    evaluation = ("eval_loss", "eval_right", "eval_sum")
    return {
        "losses": logged(trainer, "loss"),
        "evaluations": logged(trainer, *evaluation),
        "last": [last[name] for name in evaluation],
        "best": Path(trainer.state.best_model_checkpoint or "").name,
    }


def refused(trainer: Trainer) -> str:
    try:
        stow(trainer, device_budget="70%")
    except ParameterError as error:
        return str(error)
    return ""


def gathers(trainer: Any) -> bool:
    """Whether weights are gathered, beside computing or not: what takes less depends on how long operations took."""
    planned = trainer.stowage.step.planned
    calls = {call for row in planned.rows if row.node >= 0 for call in planned.nodes[row.node].calls}
    return any(planned.trace.calls[call].target == GATHER for call in calls)


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
            "plain": seen(plain),
            "stowed": seen(stowed),
            "again": seen(again),
            "within": stowed.stowage.plan.device_peak_bytes <= stowed.stowage.plan.device_budget_bytes,
            "gathers": gathers(stowed),
            "refused": refused(trainer_in(folder / "other", ddp_broadcast_buffers=False)),
        }
    )
    dist.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
