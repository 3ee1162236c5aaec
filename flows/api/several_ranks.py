"""What is asked of a model and an optimizer that several ranks train together, before anything is exchanged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from stowage.stages.ir.errors import ParameterError
from stowage.stages.optimizers import on_shards, optimizer_text
from stowage.stages.runtime.sharding.agreement import CALL, agree
from stowage.stages.runtime.sharding.ranks import Ranks
from stowage.stages.trace.checks import check_optimizer
from stowage.version import __version__


def run_together(
    ranks: Ranks, model: nn.Module, optimizer: torch.optim.Optimizer | None, settings: Mapping[str, Any]
) -> str:
    """Check what ranks are to train, and that all were given the same; return a notice for people, "" for none.

    Args:
        ranks: the processes.
        model: the model.
        optimizer: its optimizer.
        settings: arguments of `fit` that steer the plan.

    Raises:
        ParameterError: the optimizer cannot update shards, or there is none.
        RankError: a rank was given something else.
    """
    given = {name: repr(value) for name, value in settings.items()}
    agree(ranks, {CALL: "fit", **facts_of(model, optimizer), **given})
    if settings.get("check") == "gradients":
        raise ParameterError(
            "check='gradients' compares with a whole iteration of one process: with group choose 'powers', 'always' or "
            "'never'."
        )
    if optimizer is None:
        raise ParameterError(
            "Without an optimizer gradients stay in `.grad`, for which ranks that hold shards of parameters have no "
            "place: pass an optimizer, or train without group."
        )
    check_optimizer(optimizer)
    found, name = on_shards(optimizer), type(optimizer).__name__
    if found.differs:
        raise ParameterError(
            f"The optimizer {name} cannot update shards: {found.differs}; several ranks need one that treats each "
            "element by itself, such as AdamW, SGD or Lion, or train without group."
        )
    return rounding_of_shards(optimizer) if found.rounds else ""


def rounding_of_shards(optimizer: torch.optim.Optimizer) -> str:
    """Return the notice of an optimizer whose bits depend on where in a tensor an element is."""
    return (
        f"The optimizer {type(optimizer).__name__} rounds the last elements of a tensor otherwise than the others, so "
        "parameters that are updated in shards may differ in the last bit from those that are updated whole."
    )


def facts_of(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, str]:
    """Return what has to be equal on all ranks of versions, model and optimizer: a name for people -> lines of text."""
    parameters = [
        f"{name} {tuple(p.shape)} {str(p.dtype).removeprefix('torch.')}{'' if p.requires_grad else ' frozen'}"
        for name, p in model.named_parameters()
    ]
    buffers = [f"{name} {tuple(b.shape)} {str(b.dtype).removeprefix('torch.')}" for name, b in model.named_buffers()]
    names = {id(p): name for name, p in model.named_parameters()}
    return {
        "version of torch": torch.__version__,
        "version of stowage": __version__,
        "list of parameters": "\n".join(parameters),
        "list of buffers": "\n".join(buffers),
        "optimizer": optimizer_text(optimizer, names) if optimizer is not None else "none",
        "list of optimizer states": "\n".join(_states_of(optimizer, names)) if optimizer is not None else "",
    }


def _states_of(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> list[str]:
    """Return a line for each tensor that an optimizer keeps already."""
    return sorted(
        f"{names.get(id(parameter), '?')}::{key} {tuple(state.shape)} {str(state.dtype).removeprefix('torch.')}"
        for parameter, states in optimizer.state.items()
        if isinstance(states, dict)  # an optimizer of one's own may keep a counter there
        for key, state in states.items()
        if isinstance(state, torch.Tensor)
    )
