"""Has the CPU update parameters that are offloaded, with their states and gradients."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import Future, wait
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn

from stowage.stages.device.heap import ResidentLimit
from stowage.stages.device.tiers import HostMemory, Tier
from stowage.stages.ir.updates import is_gradient_slot
from stowage.stages.runtime.clipping import apply_scale
from stowage.stages.runtime.executors.verbs import Form
from stowage.stages.runtime.moves import Moves
from stowage.stages.runtime.offload.cpu_updates import CpuUpdates, Tensors, bring_counters
from stowage.stages.runtime.offload.layout import Layout
from stowage.stages.runtime.offload.transfers import Transfers


class Updating(Transfers):
    """Starts updates of what is offloaded, and takes over their results."""

    def __init__(
        self,
        tier: Tier,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        resident: ResidentLimit | None = None,
    ) -> None:
        super().__init__(tier, model, optimizer, resident)
        self._updating: dict[str, Future[dict[str, Any]]] = {}
        self._updates: CpuUpdates | None = None
        self._counted_in_lower_tier: set[str] = set()
        self._update_times: list[tuple[str, float, float]] = []
        self.moves: Moves | None = None
        """Measures how far parameters move in updates; None where nobody asks."""

    def await_updates(self) -> None:
        """Wait until the CPU has made all updates under way; their results are taken over later, as ever."""
        wait(self._updating.values())

    def update(self, parameter: str, gradient: str, scale: str | None = None, form: Form | None = None) -> None:
        """Start the update of a parameter by the CPU; see `CpuUpdates`. A scale clips the gradient where it is.

        Args:
            parameter: the parameter's name.
            gradient: the name of the gradient's slot.
            scale: the name of the slot of the factor that clips the gradient.
            form: shape, strides and offset of the gradient, if it is a view of what is in its slot.
        """
        if self._updates is None:
            assert self._optimizer is not None
            self._updates = CpuUpdates(self._optimizer)
        self._touched += 1
        weight = self._parameters[parameter]
        if is_gradient_slot(gradient):  # it waited in `.grad`
            weight.grad = None
            self._offloaded.discard(gradient)
            self._copied.discard(gradient)
        known: dict[str, Any] = self._optimizer.state.get(weight, {}) if self._optimizer is not None else {}
        with_slots = {k for k in known if f"{parameter}::{k}" in self._offloaded}

        def tensors() -> Tensors:
            state = {k: self._content(f"{parameter}::{k}") if k in with_slots else v for k, v in known.items()}
            found = self._content(gradient)
            if form is not None:
                shape, stride, offset = form
                found = found.as_strided(shape, stride, found.storage_offset() + offset)
            content = self._content(parameter), found, state
            clipped_by = self._content(scale) if scale is not None else None
            began.append(time.perf_counter())
            if clipped_by is not None:
                apply_scale([content[1]], clipped_by)
            if moves is not None and moves.watches(parameter):
                before.append(content[0].clone())
            return content

        def keep(weight: torch.Tensor, state: Mapping[str, Any]) -> dict[str, Any]:
            memory = cast(HostMemory, self.tier)
            if moves is not None and before:
                moves.measured(parameter, before.pop(), weight)
            memory.keep(parameter, weight)
            left = dict(state)
            for key in [k for k in state if f"{parameter}::{k}" in self._slots]:
                memory.keep(f"{parameter}::{key}", left[key])
                left[key] = Layout.of(left[key])
            return left

        def ended(update: Future[dict[str, Any]]) -> None:
            if began:
                self._update_times.append((parameter, began[0], time.perf_counter()))

        began: list[float] = []
        before: list[torch.Tensor] = []
        moves = self.moves
        self._updating[parameter] = self._updates.start(weight, tensors, keep)
        if self.tier.record:
            self._updating[parameter].add_done_callback(ended)

    def _content(self, name: str) -> torch.Tensor:
        """Return the tensor that is stored in a slot."""
        memory = cast(HostMemory, self.tier)
        return memory.content(self._at[name], self._layouts[name].meta())

    def _updated(self, parameter: str) -> None:
        """Take over the result of an update; new states get their slots."""
        assert self._optimizer is not None
        weight = self._parameters[parameter]
        for key, value in self._updating.pop(parameter).result().items():
            name = f"{parameter}::{key}"
            if not isinstance(value, Layout):
                self._optimizer.state[weight][key] = value
                continue
            if name not in self._offloaded:
                self._layouts[name] = replace(value, device=weight.device)
                self._optimizer.state[weight][key] = self._stand_in(name, weight.device)
                self._offloaded.add(name)
            self._copied.add(name)
        self._copied.add(parameter)
        self._counted_in_lower_tier.add(parameter)

    def before_update(self, parameter: str) -> None:
        """Prepare for an update on the device."""
        if parameter in self._counted_in_lower_tier:
            assert self._optimizer is not None
            bring_counters(self._optimizer, self._parameters[parameter])
            self._counted_in_lower_tier.discard(parameter)

    def wait(self, name: str) -> torch.Tensor | None:
        """Wait for the update or the copy of `name`, and return what was reloaded.

        Parameters and states are in their place then.
        """
        if name in self._updating:
            self._touched += 1
            self._updated(name)
            return None
        return super().wait(name)

    def where(self, name: str) -> str:
        """Return where a tensor is, in the words of `Slot.start`."""
        if name in self._under_way:
            return self._under_way[name].direction
        if name in self._updating:
            return "updating"
        return "offloaded" if name in self._offloaded else "device"
