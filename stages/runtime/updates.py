"""Uses one optimizer one parameter at a time or for all at once, with the numbers of one `step()`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from stowage.stages.ir.errors import PlanMismatchError
from stowage.stages.optimizers import step_alone, step_some


class PerParameterUpdates:
    """Runs `optimizer.step()` for a single parameter as soon as its gradient exists.

    The optimizer is the user's own object: schedulers, weight-decay groups and `state_dict` work as usual.
    While one parameter is updated the parameter groups are narrowed to it, so the optimizer's own code does the update.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
        self.optimizer = optimizer
        self._parameters = dict(parameters)
        self._groups: dict[str, int] = {}
        self._members: list[list[int]] = []
        self.refresh()

    def refresh(self) -> None:
        """Read the parameter groups again: parameters may have changed groups."""
        members = [list(map(id, group["params"])) for group in self.optimizer.param_groups]
        if members == self._members:
            return
        self._members = members
        index = {parameter: i for i, group in enumerate(members) for parameter in group}
        self._groups = {name: index[id(p)] for name, p in self._parameters.items() if id(p) in index}

    def names(self) -> set[str]:
        """Return the names of the parameters that the optimizer has."""
        return set(self._groups)

    def parameter(self, name: str) -> nn.Parameter:
        """Return a parameter by its name."""
        return self._parameters[name]

    def __call__(self, name: str, gradient: torch.Tensor) -> None:
        """Update parameter `name` with `gradient`, which is not kept."""
        group = self._group_of(name)
        parameter = self._parameters[name]
        parameter.grad = gradient
        try:
            run_gradient_hooks(parameter)
        except BaseException:
            parameter.grad = None  # otherwise it would stay there until the next step
            raise
        if parameter.grad is None:
            return  # a hook has used it up, as one that updates by itself
        step_alone(self.optimizer, group, parameter, parameter.grad)
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # what schedulers look at before they warn

    def _group_of(self, name: str) -> int:
        if name not in self._groups:
            raise PlanMismatchError(f"The plan updates '{name}', which the optimizer does not hold any more.")
        return self._groups[name]

    def some(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Update some parameters by one `step()` that knows no others, with these gradients, which are not kept."""
        members: dict[int, list[torch.Tensor]] = {}
        try:
            for name, gradient in gradients.items():
                group, parameter = self._group_of(name), self._parameters[name]
                parameter.grad = gradient
                if parameter._post_accumulate_grad_hooks:
                    run_gradient_hooks(parameter)
                    if parameter.grad is None:
                        continue  # a hook has used it up
                members.setdefault(group, []).append(parameter)
            if members:
                step_some(self.optimizer, members)
                self.optimizer._opt_called = True  # type: ignore[attr-defined]
        except BaseException:
            for name in gradients:
                self._parameters[name].grad = None  # otherwise it would stay there until the next step
            raise

    def together(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Run one `step()` of the user's object, hooks and all, with these gradients, which are not kept."""
        try:
            for name, gradient in gradients.items():
                self._parameters[name].grad = gradient
            for name in reversed(list(gradients)):
                run_gradient_hooks(self._parameters[name])
            with torch.enable_grad():
                self.optimizer.step()
        finally:
            for name in gradients:
                self._parameters[name].grad = None


def run_gradient_hooks(parameter: torch.Tensor) -> None:
    """Run the hooks of `register_post_accumulate_grad_hook`: `.grad` is complete."""
    for hook in tuple((parameter._post_accumulate_grad_hooks or {}).values()):
        hook(parameter)
