"""Gives an optimizer the shards of parameters in place of the whole ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from stowage.stages.ir.errors import ParameterError


def check_states(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> None:
    """Raise ParameterError for a parameter or a state that cannot be cut as `fully_shard` cuts a parameter.

    Args:
        optimizer: the user's optimizer.
        names: the model's parameters, `id` -> name.
    """
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise ParameterError(
                    f"The optimizer's group {index} holds a parameter of shape {list(parameter.shape)} that the model "
                    "does not have: only parameters of the model can be sharded, give others an optimizer of their own."
                )
            for key, state in optimizer.state.get(parameter, {}).items():
                if isinstance(state, torch.Tensor) and state.ndim and state.shape != parameter.shape:
                    raise ParameterError(
                        f"The optimizer's state {key!r} of {names[id(parameter)]} has the shape {list(state.shape)}, "
                        "not the parameter's, so it cannot be cut like it: shard before the optimizer's first step."
                    )


def give_shards(optimizer: torch.optim.Optimizer, names: Mapping[int, str], model: nn.Module) -> None:
    """Replace each parameter of the optimizer by its shard, and cut the states that exist.

    Args:
        optimizer: the user's optimizer; the object stays the same, so that schedulers go on.
        names: the whole parameters, `id` -> name.
        model: the sharded model.
    """
    shards = dict(model.named_parameters())
    states: dict[Any, Any] = {}
    for group in optimizer.param_groups:
        new = []
        for parameter in group["params"]:
            shard = shards[names[id(parameter)]]
            new.append(shard)
            if parameter in optimizer.state:
                states[shard] = {k: _cut(v, shard) for k, v in optimizer.state[parameter].items()}
        group["params"] = new
    others = {key: state for key, state in optimizer.state.items() if not isinstance(key, torch.Tensor)}
    optimizer.state.clear()
    optimizer.state.update({**others, **states})


def _cut(state: Any, shard: nn.Parameter) -> Any:
    """Return the part of a state that belongs to a shard; numbers, and what a parameter has once, stay whole."""
    if not isinstance(state, torch.Tensor) or not state.ndim:
        return state
    parameter: Any = shard
    assert isinstance(parameter, DTensor)
    local = parameter.to_local()
    (placement,), mesh = parameter.placements, parameter.device_mesh
    assert isinstance(placement, Shard)
    chunks = torch.chunk(state, mesh.size(), dim=placement.dim)
    rank = mesh.get_local_rank()
    mine = chunks[rank].clone() if rank < len(chunks) else state.new_empty(local.shape)
    return DTensor.from_local(
        mine.to(local.device), mesh, [placement], run_check=False, shape=state.shape, stride=state.stride()
    )
