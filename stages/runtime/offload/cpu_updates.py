"""Runs updates by the CPU, on what is in the lower tier, in one worker thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import nn

from stowage.stages.optimizers import bare_step, twin_of

Tensors = tuple[torch.Tensor, torch.Tensor, dict[str, Any]]
"""Weight, gradient and state in host memory; weight and state are changed in place."""

Keep = Callable[[torch.Tensor, Mapping[str, Any]], dict[str, Any]]
"""Puts a weight and its state back into the lower tier, and says what became of the state."""


def bring_counters(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> None:
    """Copy numbers that the CPU has counted, such as the step, to where an update on the device reads them.

    With `fused` and `capturable` kernels read the number of steps from the parameter's device, and would take a host
    address for one of the device.
    """
    group = next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
    if not (group.get("fused") or group.get("capturable")):
        return
    state = optimizer.state.get(parameter, {})
    for key, value in state.items():
        if torch.is_tensor(value) and value.dim() == 0 and value.device != parameter.device:
            state[key] = value.to(parameter.device)


class CpuUpdates:
    """Runs the optimizer's own code for one parameter at a time, on tensors in host memory.

    The parameter on the device is not touched: a twin of it, made of the slot's memory, is updated by a copy of the
    optimizer with the present settings. States stay in the lower tier; the user's optimizer keeps their names. What is
    stored on a disk is in host memory for one update at a time.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._copies: dict[int, torch.optim.Optimizer] = {}
        self._places: dict[int, tuple[int, int]] = {}
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="stowage-update")

    def start(self, parameter: nn.Parameter, tensors: Callable[[], Tensors], keep: Keep) -> Future[dict[str, Any]]:
        """Begin the update of a parameter, with the settings of this moment, such as the learning rate.

        Args:
            parameter: the parameter, as the optimizer knows it.
            tensors: called in the worker, where it may wait for copies.
            keep: called in the worker after the update.

        Returns:
            The result of `keep`.
        """
        group = self._group_of(parameter)
        if id(group) not in self._copies:
            stand_in = nn.Parameter(torch.empty(0, dtype=parameter.dtype, device="cpu"))
            self._copies[id(group)] = twin_of(self._optimizer, {id(parameter): stand_in})
        settings = {key: value for key, value in group.items() if key != "params"}
        if "capturable" in settings:  # is for CUDA graphs; a CPU's update refuses it, and computes the same without
            settings["capturable"] = False
        return self._worker.submit(self._update, self._copies[id(group)], settings, tensors, keep)

    def _group_of(self, parameter: torch.Tensor) -> dict[str, Any]:
        """Return the parameter's group; look first where the parameter was found last."""
        groups = self._optimizer.param_groups
        number, place = self._places.get(id(parameter), (0, 0))
        members = groups[number]["params"] if number < len(groups) else []
        if place < len(members) and members[place] is parameter:
            return groups[number]
        self._places = {id(p): (n, i) for n, group in enumerate(groups) for i, p in enumerate(group["params"])}
        return groups[self._places[id(parameter)][0]]

    def _update(
        self, alone: torch.optim.Optimizer, settings: dict[str, Any], tensors: Callable[[], Tensors], keep: Keep
    ) -> dict[str, Any]:
        weight, gradient, state = tensors()
        twin = nn.Parameter(weight)
        twin.grad = gradient
        alone.param_groups[0].update(settings, params=[twin])
        alone.state.clear()
        if state:  # what is not in the lower tier, such as the number of steps, may have been loaded to the device
            alone.state[twin] = {k: v.to(weight.device) if torch.is_tensor(v) else v for k, v in state.items()}
        with torch.enable_grad():  # as in a plain training loop; the optimizer switches gradients off itself
            bare_step(alone)
        found = dict(alone.state.pop(twin, {}))
        alone.param_groups[0]["params"] = []
        return keep(twin.detach(), found)
