"""Gives all ranks the first rank's buffers before forwards, as DDP does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from stowage.stages.runtime.sharding.ranks import Ranks


def share_buffers(model: nn.Module, ranks: Ranks) -> None:
    """Broadcast the model's buffers from the first rank before each forward before which DDP does.

    That is, in training and in evaluation, before the first one, and before each that follows one with gradients that
    are reduced: between micro-batches that are reduced together, ranks have buffers of their own, and so they have
    after forwards without gradients. `fully_shard` leaves buffers alone.
    """
    if not any(True for _ in model.buffers()):
        return
    due = True

    def broadcast(module: nn.Module, _arguments: Any) -> None:
        if due:
            with torch.no_grad():
                for name, buffer in module.named_buffers():
                    ranks.broadcast(buffer, f"buffer '{name}' of rank 0")

    def note(module: nn.Module, _arguments: Any, _outputs: Any) -> None:
        nonlocal due
        due = torch.is_grad_enabled() and all(_reduced(module))

    model.register_forward_pre_hook(broadcast)
    model.register_forward_hook(note)


def _reduced(model: nn.Module) -> Iterator[bool]:
    """Yield for each group whether its gradients are to be reduced: what `set_requires_gradient_sync` has set."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None)
            if groups is None:  # versions of PyTorch with one of them
                groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
            yield from (group.reduce_grads for group in groups)
