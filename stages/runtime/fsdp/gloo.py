"""Lets the collectives of FSDP2 on gloo end when their memory is free, so that a rank's peak is what the plan says.

A thread of gloo's refers to what it has sent for a while after the collective has ended, on a busy machine until the
next group's is under way. The sums are those of FSDP2's own collectives, which add whole copies of gradients too.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from stowage.stages.runtime.fsdp.collectives import AllGather, ReduceScatter
from stowage.stages.runtime.sharding.memory import alone_with, release, users_of


class GlooAllGather(AllGather):
    """Gathers shards, and waits until nobody else refers to them."""

    def gather(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool) -> Any:
        """Fill `output_tensor` with the shards of all ranks."""
        users = users_of(output_tensor)
        work = super().gather(output_tensor, input_tensor, group, async_op)
        if not async_op:
            alone_with(output_tensor, users)
        return work


class GlooReduceScatter(ReduceScatter):
    """Adds up gradients in a copy, which it frees."""

    def reduce(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool
    ) -> None:
        """Fill `output_tensor` with this rank's part of the sum, also where FSDP2 would go on meanwhile."""
        del async_op
        copy = input_tensor.clone()
        dist.all_reduce(copy, op=op, group=group)
        output_tensor.copy_(copy.chunk(dist.get_world_size(group))[dist.get_rank(group)].view(output_tensor.shape))
        release(copy)
