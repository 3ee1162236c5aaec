"""Runs one `step()` of an optimizer for one or some of its parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

Step = Callable[[torch.optim.Optimizer], Any]


def bare_step(optimizer: torch.optim.Optimizer) -> None:
    """Run the step of the optimizer's class, without hooks and without what a schedule put over it on the object."""
    step: Any = type(optimizer).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__
    step(optimizer)


def class_step(optimizer: torch.optim.Optimizer) -> None:
    """Run the step of the optimizer's class with its hooks, without what a schedule put over it on the object."""
    step: Any = type(optimizer).step
    step(optimizer)


def own_step(optimizer: torch.optim.Optimizer) -> bool:
    """Say whether the object's `step` was replaced by something other than a schedule's counter of calls."""
    step: Any = vars(optimizer).get("step")
    if step is None:
        return False
    counts = getattr(step, "_wrapped_by_lr_sched", False)
    return not (counts and getattr(step, "__wrapped__", None) is type(optimizer).step)


def step_alone(
    optimizer: torch.optim.Optimizer,
    group_of: int,
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    step: Step = class_step,
) -> None:
    """Step while the groups are narrowed to one parameter, so that the optimizer's own code does its update.

    Args:
        optimizer: any optimizer.
        group_of: the position of the group that holds the parameter.
        parameter: the parameter to update.
        gradient: its gradient, released afterwards.
        step: the function that takes the step.
    """
    parameter.grad = gradient
    step_some(optimizer, {group_of: [parameter]}, step)


def step_some(
    optimizer: torch.optim.Optimizer, members: Mapping[int, Sequence[torch.Tensor]], step: Step = class_step
) -> None:
    """Step while the groups are narrowed to some parameters, whose `.grad` is set, and released afterwards.

    Args:
        optimizer: any optimizer.
        members: position of a group -> those of its parameters that are updated, in the group's order.
        step: the function that takes the step.
    """
    groups = optimizer.param_groups
    whole: list[list[Any]] = [group["params"] for group in groups]
    try:
        for index, group in enumerate(groups):
            group["params"] = list(members.get(index, ()))
        with torch.enable_grad():  # as in a plain training loop; the optimizer switches gradients off itself
            step(optimizer)
    finally:
        for group, before in zip(groups, whole, strict=True):
            group["params"] = before
        for updated in members.values():
            for parameter in updated:
                parameter.grad = None
