"""Lends a sharded model whole: all parameters and optimizer states on every rank, and shards of what they are after."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch

from stowage.stages.runtime.sharding.sharding import Sharding


@contextmanager
def whole_model(
    sharding: Sharding, optimizer: torch.optim.Optimizer | None, names: Collection[str] | None = None
) -> Iterator[None]:
    """Let parameters and states be whole inside; all ranks enter and leave together, with shards in memory.

    Each rank keeps its shard of what it finds afterwards, so changes that all ranks make alike are kept.

    Args:
        sharding: the shards of the model.
        optimizer: its optimizer.
        names: names of parameters and states (`parameter::state`); by default all.
    """
    parameters = {n: p for n, p in sharding.parameters().items() if n in sharding.forms}
    lent = {n: p for n, p in parameters.items() if names is None or n in names}
    lent_states = set[tuple[str, str]]()
    """A shard may have the shape of the whole, where there is one row: then the shape does not tell."""
    for name, parameter in lent.items():
        parameter.data = sharding.whole(name, parameter.detach())
        if name in sharding.gradients:
            parameter.grad = sharding.gradients.pop(name)
    for name, parameter in parameters.items():
        for key, state in _states(optimizer, parameter):
            if tuple(state.shape) == sharding.forms[name].shape and (names is None or f"{name}::{key}" in names):
                state.data = sharding.whole(name, state.detach())
                lent_states.add((name, key))
    try:
        yield
    finally:
        for name, parameter in parameters.items():
            whole = sharding.whole_layout(name)
            for key, state in _states(optimizer, parameter):
                made = state.shape != sharding.forms[name].shape and (whole.dim() or key != "step")
                if state.shape == whole.shape and (made or (name, key) in lent_states):
                    state.data = sharding.cut(name, _laid_out(state, whole))
        for name, parameter in lent.items():
            if parameter.grad is not None:
                sharding.gradients[name], parameter.grad = parameter.grad, None
            parameter.data = sharding.cut(name, _laid_out(parameter, sharding.whole_layout(name)))


def _states(optimizer: torch.optim.Optimizer | None, parameter: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    found = optimizer.state.get(parameter, {}) if optimizer is not None else {}
    return [(key, state) for key, state in found.items() if isinstance(state, torch.Tensor)]


def _laid_out(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return the numbers in the layout of the whole parameter, which the user may have replaced by another."""
    if tensor.stride() == like.stride():
        return tensor.detach()
    found = torch.empty_strided(like.shape, like.stride(), dtype=tensor.dtype, device=tensor.device)
    return found.copy_(tensor.detach())
