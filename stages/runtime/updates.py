"""One optimizer, used one parameter at a time: the same class, the same states, the same numbers as one `step()`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class PerParameterUpdates:
    """Runs `optimizer.step()` for a single parameter as soon as its gradient exists.

    The optimizer is the user's own object: schedulers, weight-decay groups and `state_dict` work as usual.
    While one parameter is updated the parameter groups are narrowed to it, so the optimizer's own code does the update.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: dict[str, nn.Parameter]) -> None:
        self.optimizer = optimizer
        self._parameters = parameters
        self._groups: dict[str, int] = {}
        names = {id(p): n for n, p in parameters.items()}
        for index, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if id(parameter) in names:
                    self._groups[names[id(parameter)]] = index

    def names(self) -> set[str]:
        """Parameters that the optimizer holds."""
        return set(self._groups)

    def __call__(self, name: str, gradient: torch.Tensor) -> None:
        """Update parameter `name` with `gradient`, which is not kept."""
        parameter = self._parameters[name]
        groups = self.optimizer.param_groups
        whole: list[list[Any]] = [group["params"] for group in groups]
        parameter.grad = gradient
        run_gradient_hooks(parameter)
        if parameter.grad is None:
            return  # a hook has used it up, as one that updates by itself
        try:
            for index, group in enumerate(groups):
                group["params"] = [parameter] if index == self._groups[name] else []
            with torch.enable_grad():  # as in a plain training loop; the optimizer switches gradients off itself
                _unwrapped_step(self.optimizer)()
            self.optimizer._opt_called = True  # type: ignore[attr-defined]  # what schedulers look at before they warn
        finally:
            for group, members in zip(groups, whole, strict=True):
                group["params"] = members
            parameter.grad = None


def _unwrapped_step(optimizer: torch.optim.Optimizer) -> Any:
    """The optimizer's own `step`, not the instance attribute that schedulers put over it to count calls."""
    return type(optimizer).step.__get__(optimizer)


def run_gradient_hooks(parameter: torch.Tensor) -> None:
    """What `register_post_accumulate_grad_hook` has registered: `.grad` is complete."""
    for hook in tuple((parameter._post_accumulate_grad_hooks or {}).values()):
        hook(parameter)
