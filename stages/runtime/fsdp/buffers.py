"""Gives all ranks the first rank's buffers before each forward in training, as DDP does."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from stowage.stages.runtime.sharding.ranks import Ranks


def share_buffers(model: nn.Module, ranks: Ranks) -> None:
    """Broadcast the model's buffers from the first rank before each forward in which gradients are computed.

    `fully_shard` leaves buffers alone, so that running statistics of batch normalisation would differ between ranks.
    """
    if not any(True for _ in model.buffers()):
        return

    def broadcast(module: nn.Module, _arguments: Any) -> None:
        if not (module.training and torch.is_grad_enabled()):
            return
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                ranks.broadcast(buffer, f"buffer '{name}' of rank 0")

    model.register_forward_pre_hook(broadcast)
