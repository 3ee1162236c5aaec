"""Lets the collectives of FSDP2 on gloo end when their memory is free, so that a rank's peak is what the plan says.

A thread of gloo's refers to what it has sent for a while after the collective has ended, on a busy machine until the
next group's is under way. The sums are those of FSDP2's own collectives, which add whole copies of gradients too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from stowage.stages.runtime.sharding.memory import alone_with, release, users_of

# Methods that versions of PyTorch before 2.8 lack: there memory stays a little longer.
WANTED = ("set_custom_all_gather", "set_custom_reduce_scatter")


def free_in_time(model: nn.Module, group: Any) -> None:
    """Replace the collectives of a model that `fully_shard` has sharded, where its group is one of gloo."""
    if str(dist.get_backend(group)) != "gloo":
        return
    sharded: list[Any] = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in sharded:
        if all(hasattr(module, name) for name in WANTED):
            module.set_custom_all_gather(AllGather())
            module.set_custom_reduce_scatter(ReduceScatter())


class _Memory:
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return new memory."""
        return torch.empty(*size, dtype=dtype, device=device)


class AllGather(_Memory):
    """Gathers shards, and waits until nobody else refers to them; see FSDP2's `AllGather`."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> Any:
        """Fill `output_tensor` with the shards of all ranks."""
        users = users_of(output_tensor)
        start = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        work = start(output_tensor, input_tensor, group=group, async_op=async_op)
        if not async_op:
            alone_with(output_tensor, users)
        return work


class ReduceScatter(_Memory):
    """Adds up gradients in a copy, which it frees; see FSDP2's `ReduceScatter`."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """Fill `output_tensor` with this rank's part of the sum, also where FSDP2 would go on meanwhile."""
        del async_op
        copy = input_tensor.clone()
        dist.all_reduce(copy, op=op, group=group)
        output_tensor.copy_(copy.chunk(dist.get_world_size(group))[dist.get_rank(group)].view(output_tensor.shape))
        release(copy)
