"""Tries on copies whether an optimizer can step what `fully_shard` makes: tensors of a class of their own."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from stowage.stages.optimizers import bare_step, one_of_each_kind, twin_of
from stowage.stages.optimizers.quiet import quiet

SIDE = 4
"""Sides of stand-ins."""


def why_not_as_dtensors(optimizer: torch.optim.Optimizer, mesh: DeviceMesh) -> str:
    """Return why an optimizer cannot step the shards that `fully_shard` makes; "" where it can.

    Args:
        optimizer: the optimizer; a copy steps stand-ins.
        mesh: the ranks; they exchange nothing for it.

    Raises:
        TraceError: the optimizer cannot be copied.
    """
    originals = one_of_each_kind(optimizer)

    def as_shard(like: nn.Parameter) -> DTensor:
        local = torch.ones((SIDE, *(min(n, SIDE) for n in like.shape[1:])), device=mesh.device_type)
        return DTensor.from_local(local, mesh, [Shard(0)], run_check=False)

    with quiet():
        stand_ins = [nn.Parameter(as_shard(p)) for p in originals]
        twin = twin_of(optimizer, {id(p): s for p, s in zip(originals, stand_ins, strict=True)})
        for original, stand_in in zip(originals, stand_ins, strict=True):
            stand_in.grad = as_shard(original)
        try:
            for _ in range(2):
                bare_step(twin)
        except Exception as error:  # an optimizer may raise anything
            return f"{type(error).__name__}: {str(error).partition('. ')[0].partition(chr(10))[0].strip()}"
    return ""
