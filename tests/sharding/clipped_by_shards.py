"""Clips whole gradients by the norm that ranks take of their shards: in plain PyTorch, bit for bit.

`clip_grad_norm_` adds all squares of a whole gradient at once; ranks that have a shard each add two sums of squares.
Both are as exact as the other, and differ by rounding, which then is in every parameter.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

from stowage.stages.ir.collectives import ShardForm
from stowage.stages.runtime.sharding.sharding import cut


def clip_by_shards(parameters: Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
    """Clip the gradients of parameters in place, and return the norm of all of them.

    Args:
        parameters: those of the model, in its order; the ones without a gradient count nothing.
        max_norm: the limit.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    norms = []
    for gradient in gradients:
        form = ShardForm.of(gradient.shape, gradient.stride(), dist.get_world_size())
        own = gradient if form is None else cut(form, gradient, dist.get_rank())
        norms.append(torch.linalg.vector_norm(own, 2.0))
    total = torch.linalg.vector_norm(torch.stack(norms), 2.0).square()
    dist.all_reduce(total)
    norm = total.sqrt()
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for gradient in gradients:
        gradient.mul_(factor)
    return norm
