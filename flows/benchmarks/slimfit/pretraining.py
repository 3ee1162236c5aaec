"""Trains a task's model on what comes before it, once, and keeps the weights."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from safetensors.torch import load_file, save
from torch import nn

from stowage.flows.benchmarks.slimfit.tasks import Job, Task
from stowage.stages.ir.files import write_atomically
from stowage.stages.workload.randomness import seeded

SEED = 0


def train(job: Job, model: nn.Module, seed: int) -> None:
    """Train a model on all of a job, with every parameter."""
    optimizer, schedule = optimizer_of(job, model)
    with seeded(seed):
        for iteration in range(job.iterations):
            optimizer.zero_grad()
            model(**job.batch(seed, iteration)).loss.backward()
            optimizer.step()
            schedule.step()


def optimizer_of(job: Job, model: nn.Module) -> tuple[torch.optim.AdamW, torch.optim.lr_scheduler.LinearLR]:
    """Make a job's optimizer, and the schedule of its learning rate."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=job.learning_rate)
    return optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, job.iterations)


def pretrained(task: Task, seed: int, stores: Path) -> nn.Module:
    """Return a task's model with a new head from a seed, and the rest as pre-training left it.

    Args:
        task: which one.
        seed: seed of the head.
        stores: a folder with the weights of earlier calls.
    """
    before = task.before.build(SEED)
    text = f"{task.before.iterations} {task.before.learning_rate} {before.config} {before}"
    path = stores / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.safetensors"
    if not path.is_file():
        train(task.before, before, SEED)
        path.parent.mkdir(parents=True, exist_ok=True)
        state = {name: tensor.clone().contiguous() for name, tensor in before.state_dict().items()}
        write_atomically(path, save(state))
    weights = load_file(path)
    model = task.job.build(seed)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name in weights and weights[name].shape == tensor.shape and not _of_head(name):
                tensor.copy_(weights[name])
    return model


def _of_head(name: str) -> bool:
    return name.startswith("classifier")
