"""Gives all ranks the first rank's buffers before each forward in training, as DDP does."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn


def share_buffers(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Broadcast the model's buffers from the first rank before each forward in which gradients are computed.

    `fully_shard` leaves buffers alone, so that running statistics of batch normalisation would differ between ranks.
    """
    if not any(True for _ in model.buffers()):
        return
    source = dist.get_global_rank(group, 0)

    def broadcast(module: nn.Module, _arguments: Any) -> None:
        if not (module.training and torch.is_grad_enabled()):
            return
        with torch.no_grad():
            for buffer in module.buffers():
                dist.broadcast(buffer, source, group=group)

    model.register_forward_pre_hook(broadcast)
