"""Calls a model on a batch and finds its loss, in the same way for tracing and for plain training."""

from __future__ import annotations

import inspect
from collections import UserList
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from stowage.stages.ir.errors import ParameterError, TraceError

Loss = Callable[[Any, Any], torch.Tensor]
"""Maps the model's outputs and the batch to the scalar to differentiate."""

Objective = Callable[[nn.Module, Any], torch.Tensor]
"""Maps the model and the batch to the scalar to differentiate, for users who call the model themselves."""


WAY_IN = "forward=lambda model, batch: criterion(model(batch[0]), batch[1])"
"""The argument that suits the most common training loop, for error messages."""


def call_model(model: nn.Module, batch: Any) -> Any:
    """Call the model as users do: a mapping gives keywords, a tuple or list positions, anything else one argument.

    Raises:
        ParameterError: the model does not take these arguments.
    """
    positions, keywords = _arguments(batch)
    try:
        return model(*positions, **keywords)
    except TypeError:
        if _takes(model, positions, keywords):
            raise  # the error was raised inside the model
    given = f"keywords {', '.join(map(repr, keywords))}" if keywords else f"{len(positions)} positions"
    raise ParameterError(
        f"{type(model).__name__}.forward{_parameters(model)} does not take this batch, which is passed as {given}: "
        f"where the batch has more than the model takes, such as targets, pass {WAY_IN}."
    )


def _arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, (tuple, list, UserList)):
        return tuple(batch), {}
    return (batch,), {}


def _takes(model: nn.Module, positions: tuple[Any, ...], keywords: dict[str, Any]) -> bool:
    try:
        inspect.signature(model.forward).bind(*positions, **keywords)
    except TypeError:
        return False
    except ValueError:  # it has no signature
        return True
    return True


def _parameters(model: nn.Module) -> str:
    names = inspect.signature(model.forward).parameters
    return f"({', '.join(names)})"


def loss_of(outputs: Any, batch: Any, loss: Loss | None, *, trains: bool = True) -> torch.Tensor:
    """Return the scalar to differentiate.

    It is `loss(outputs, batch)`, else `outputs.loss` or `outputs["loss"]`, else the output itself if it is a scalar.

    Args:
        outputs: what the model returns.
        batch: what it was called with.
        loss: computes the scalar.
        trains: the scalar has to depend on a trainable parameter.

    Raises:
        TraceError: there is no such scalar, or it depends on no trainable parameter.
    """
    if loss is not None:
        result = loss(outputs, batch)
    elif isinstance(getattr(outputs, "loss", None), torch.Tensor):
        result = outputs.loss
    elif isinstance(outputs, Mapping) and isinstance(outputs.get("loss"), torch.Tensor):
        result = outputs["loss"]
    elif isinstance(outputs, torch.Tensor) and outputs.ndim == 0:
        result = outputs
    else:
        tensor = isinstance(outputs, torch.Tensor)
        what = f"a tensor of shape {tuple(outputs.shape)}" if tensor else type(outputs).__name__
        raise TraceError(
            f"The model returns {what} without a scalar `loss`: pass loss=callable(outputs, batch), "
            f"put labels into the batch, or pass {WAY_IN}."
        )
    if not isinstance(result, torch.Tensor) or result.numel() != 1:
        shape = tuple(result.shape) if isinstance(result, torch.Tensor) else type(result).__name__
        raise TraceError(f"The loss must be one number, but it is {shape}: reduce it, for example with .mean().")
    if trains and not result.requires_grad:
        raise TraceError(
            "The loss depends on no trainable parameter: check requires_grad and torch.no_grad in the model."
        )
    return result


def compute_loss(
    model: nn.Module, batch: Any, *, loss: Loss | None, objective: Objective | None, trains: bool = True
) -> torch.Tensor:
    """Return what one step differentiates.

    It is `objective(model, batch)` if there is an objective, else the loss that `loss_of` finds in what `call_model`
    returns.

    Raises:
        TraceError: see `loss_of`.
    """
    if objective is not None:
        return loss_of(objective(model, batch), batch, lambda value, _: value, trains=trains)
    return loss_of(call_model(model, batch), batch, loss, trains=trains)
