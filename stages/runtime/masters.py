"""Wraps any optimizer that works per tensor, so that weights in bfloat16 or float16 have float32 master copies."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from stowage.stages.ir.errors import ParameterError

MASTER = "master"
HALVES = (torch.bfloat16, torch.float16)


class MasterWeights(torch.optim.Optimizer):
    """An optimizer on float32 copies of low-precision weights.

    For every parameter in bfloat16 or float16, `step()` does what this would do:

        master.grad = parameter.grad.float()   # master = parameter.float(), made at the first step
        inner.step()                           # AdamW, SGD, ... with its states in float32
        parameter.copy_(master)                # rounded to nearest

    Parameters of other types are updated by the inner optimizer directly. Masters are optimizer states: they are in
    `state_dict` under `master`, and count as states in a plan.

    Args:
        params: parameters or groups, as for any optimizer.
        inner: the optimizer's class, importable by its module and name.
        settings: the inner optimizer's keyword arguments.

    Raises:
        ParameterError: `inner` is not an optimizer's class that can be imported.
    """

    def __init__(self, params: Any, inner: type[torch.optim.Optimizer] | None = None, **settings: Any) -> None:
        if inner is None:  # made from groups that state it themselves, as planning does
            params = list(params)
            names = {group.get("inner") for group in params if isinstance(group, dict)}
            if len(names) != 1 or None in names:
                raise ParameterError("MasterWeights needs the class of the optimizer that it wraps, such as AdamW.")
            inner = _class_of(names.pop())
        name = f"{inner.__module__}:{inner.__qualname__}"
        if _class_of(name) is not inner:
            raise ParameterError(f"MasterWeights cannot import {name}: define the optimizer at the top of a module.")
        defaults = inner([nn.Parameter(torch.zeros(1, device="cpu"))], **settings).defaults
        super().__init__(params, {**defaults, "inner": name})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        for group in self.param_groups:
            settings = {k: v for k, v in group.items() if k not in ("params", "inner")}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, _class_of(group["inner"]), settings)
        return result

    def _update(self, parameter: torch.Tensor, inner: Any, settings: dict[str, Any]) -> None:
        state = self.state[parameter]
        half = parameter.dtype in HALVES
        if half and MASTER not in state:
            state[MASTER] = parameter.detach().float()
        target = nn.Parameter(state[MASTER] if half else parameter.detach())  # shares its memory
        target.grad = parameter.grad.float() if half and parameter.grad is not None else parameter.grad
        single = inner([{"params": [target], **settings}])
        known = {k: v for k, v in state.items() if k != MASTER}
        if known:
            single.state[target] = known
        single.step()
        state.update(single.state[target])
        if half:
            parameter.copy_(target)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load states with their dtypes as saved; PyTorch's own way would round masters to their parameter's type."""
        super().load_state_dict(state_dict)
        parameters = [p for group in self.param_groups for p in group["params"]]
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        for parameter, number in zip(parameters, numbers, strict=True):
            for name, value in state_dict["state"].get(number, {}).items():
                if isinstance(value, torch.Tensor):
                    device = parameter.device if value.ndim else value.device
                    self.state[parameter][name] = value.detach().to(device).clone()


def _class_of(name: str | None) -> Any:
    module, _, path = (name or "").partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise ParameterError(
            f"MasterWeights cannot import {name}: define the optimizer at the top of a module."
        ) from error
    return found
