"""Takes the place of DistributedDataParallel in a Trainer that `accelerate launch` or `torchrun` starts."""

from __future__ import annotations

import functools
from typing import Any

import torch.distributed as dist
from torch import nn

from stowage.stages.ir.errors import ParameterError

_DDP = ("MULTI_CPU", "MULTI_GPU")
"""Kinds of distributed training in which accelerate would wrap the model in DistributedDataParallel."""


def ranks_of(trainer: Any) -> int:
    """Return the number of processes that train together."""
    return int(getattr(trainer.args, "world_size", 1))


def group_of(trainer: Any) -> Any:
    """Return the process group that the Trainer's processes form; None for a process alone."""
    return dist.group.WORLD if ranks_of(trainer) > 1 else None


def other_than_ddp(trainer: Any) -> str:
    """Return what several processes do that no plan does; "" where they would use DistributedDataParallel as it is."""
    if ranks_of(trainer) == 1:
        return ""
    accelerator = trainer.accelerator
    kind = str(getattr(accelerator.distributed_type, "name", accelerator.distributed_type))
    if kind not in _DDP or getattr(accelerator, "parallelism_config", None) is not None:
        return f"its processes train together by {kind}, and not by DistributedDataParallel"
    wanted = accelerator.ddp_handler.to_kwargs() if accelerator.ddp_handler is not None else {}
    if not wanted.get("broadcast_buffers", True):
        return "ddp_broadcast_buffers=False leaves the ranks' buffers apart"
    if getattr(getattr(accelerator.ddp_handler, "comm_hook", None), "name", "NO") != "NO":
        return "a communication hook changes the gradients that ranks exchange"
    return ""


def leave_unwrapped(trainer: Any) -> None:
    """Let accelerate prepare the model without DistributedDataParallel, whose buckets hold all gradients once more."""
    if ranks_of(trainer) == 1:
        return
    accelerator = trainer.accelerator
    prepare = accelerator.prepare_model

    @functools.wraps(prepare)
    def prepare_model(model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
        return prepare(model, device_placement, evaluation_mode=evaluation_mode or model is trainer.model)

    accelerator.prepare_model = prepare_model


def require_unwrapped(model: nn.Module) -> None:
    """Refuse a model that is wrapped.

    Raises:
        ParameterError: it is.
    """
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise ParameterError(
            "The Trainer has wrapped its model in DistributedDataParallel already, or has made a new accelerator since "
            "stow: call stow before train(), and leave auto_find_batch_size off."
        )
