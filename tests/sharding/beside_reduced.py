"""Trains models whole, with gradients averaged by the collectives of FSDP2's groups: its sums in plain PyTorch.

From three ranks on, the ring of an all-reduce adds in another order in each rank's part of its buffer. FSDP2 puts the
rows that a rank keeps into that rank's part, DistributedDataParallel whole gradients one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.sharding.beside_ddp import MODELS, OPTIMIZERS, content, sum_in_blocks, train

Trained = tuple[list[float], dict[str, torch.Tensor]]
"""Losses, and parameters, states and buffers, whole."""


def under_collectives(name: str, kind: str, groups: Sequence[Sequence[str]]) -> Trained:
    """Train a model whose gradients are averaged group by group; buffers are rank 0's before each forward.

    Args:
        name: the model.
        kind: the optimizer.
        groups: names of the parameters of each group.
    """
    model, batch, loss = MODELS[name]()
    if name == "t5":
        sum_in_blocks([*model.encoder.block, *model.decoder.block])
    optimizer = OPTIMIZERS[kind](p for p in model.parameters() if p.requires_grad)
    members = [[p for n, p in model.named_parameters() if n in set(group)] for group in groups]

    def average(*_: Any) -> None:
        for parameters in members:
            _average([p for p in parameters if p.grad is not None])

    def share(module: nn.Module, _arguments: Any) -> None:
        for buffer in module.buffers():
            dist.broadcast(buffer, 0)

    optimizer.register_step_pre_hook(average)
    model.register_forward_pre_hook(share)
    losses = train(model, optimizer, batch, loss)
    return losses, content(model, optimizer)


def _average(parameters: Sequence[nn.Parameter]) -> None:
    """Average gradients in one buffer: first what the first rank has of each, then what the second has, and so on."""
    count = dist.get_world_size()
    wholes = []
    for parameter in parameters:
        assert parameter.grad is not None
        rows = parameter.grad.reshape(len(parameter), -1) if parameter.ndim else parameter.grad.reshape(1, 1)
        lacking = -len(rows) % count
        wholes.append(torch.cat([rows, rows.new_zeros(lacking, rows.shape[1])]).view(count, -1))
    if not wholes:
        return
    buffer = torch.cat(wholes, dim=1)
    dist.all_reduce(buffer)
    buffer /= count
    for parameter, part in zip(parameters, buffer.split([w.shape[1] for w in wholes], dim=1), strict=True):
        parameter.grad = part.reshape(-1)[: parameter.numel()].view(parameter.shape).clone()
