"""Manages the lower tier for one model and its optimizer: all that generated code and others ask of it.

A parameter or state that is not on the device keeps its shape and dtype; its memory is one number, NaN (0 where the
dtype has none), and reading it raises an error (`offloaded_tensor`). So nothing can quietly train on it.

Each class adds one job to the one before it: `Ledger` knows what is where, `Transfers` copies, `Updating` has the CPU
update what is offloaded, `Placing` puts tensors in their places, and `Offloading` lends them to others.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from concurrent.futures import wait

import torch
from torch import nn

from stowage.stages.device.heap import ResidentLimit
from stowage.stages.device.tiers import Tier
from stowage.stages.ir.run import TraceSpan
from stowage.stages.ir.updates import is_gradient_slot
from stowage.stages.runtime.offload.offloaded_tensor import arrive, leave
from stowage.stages.runtime.offload.placing import Placing
from stowage.stages.runtime.offload.state_dicts import guard_module, guard_optimizer


class Offloading(Placing):
    """Offloads, reloads and updates what plans want, and lends it to whoever asks in between."""

    def __init__(
        self,
        tier: Tier,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        resident: ResidentLimit | None = None,
    ) -> None:
        """Guard model and optimizer; `resident` limits what the process may occupy, where that is the device."""
        super().__init__(tier, model, optimizer, resident)
        self._raw = False
        guard_module(model, self._absent.within)
        if optimizer is not None:
            guard_optimizer(optimizer, self._first_offloaded_state)

    def serves(self, optimizer: torch.optim.Optimizer | None) -> bool:
        """Return whether this optimizer's states are the ones that are offloaded."""
        return optimizer is self._optimizer

    def serve(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Serve another optimizer of the same parameters from now on."""
        self._touched += 1
        self.forget_states()
        if optimizer is not None and optimizer is not self._optimizer:
            guard_optimizer(optimizer, self._first_offloaded_state)
        self._optimizer = optimizer
        self._updates = None

    def _first_offloaded_state(self, optimizer: torch.optim.Optimizer) -> str | None:
        if optimizer is not self._optimizer or self._raw:
            return None
        return next((n for n in sorted(self._offloaded) if "::" in n and not is_gradient_slot(n)), None)

    @contextlib.contextmanager
    def raw_states(self) -> Iterator[None]:
        """Let the optimizer's `state_dict` give stand-ins for its states inside."""
        self._raw = True
        try:
            yield
        finally:
            self._raw = False

    def offloaded(self) -> dict[int, str]:
        """Return the names of parameters and states that are offloaded, by the identity of their stand-ins."""
        self.settle_all()
        return {id(tensor): name for name in self._offloaded if (tensor := self._tensor(name)) is not None}

    def offloaded_parameters(self) -> dict[str, torch.Tensor]:
        """Return the stand-ins of parameters that are offloaded, by name."""
        self.settle_all()
        return {name: self._parameters[name] for name in sorted(self._offloaded) if name in self._parameters}

    @contextlib.contextmanager
    def lending(self) -> Iterator[None]:
        """Allow calls of modules with offloaded parameters inside: the caller reloads what they read (`peek`)."""
        lent = list(self.offloaded_parameters().values())
        self._touched += 1
        self._absent.lending = True
        for tensor in lent:
            arrive(tensor)
        try:
            yield
        finally:
            self._absent.lending = False
            for name, tensor in self.offloaded_parameters().items():
                leave(tensor, name)

    def record(self, on: bool) -> None:
        """Switch on or off that the times of copies and of CPU updates are recorded."""
        self.tier.record = on
        self._update_times.clear()

    def recorded(self) -> list[TraceSpan]:
        """Return what was recorded, on the scale of `time.perf_counter`."""
        copies = [TraceSpan("measured", s.stream, s.name, s.nbytes, s.start_s, s.end_s) for s in self.tier.spans]
        return copies + [TraceSpan("measured", "update", name, 0, a, b) for name, a, b in self._update_times]

    def let_finish(self, seconds: float) -> None:
        """Wait at most so many seconds for copies and updates to end; the plan still has to wait for them."""
        deadline = time.monotonic() + seconds
        for transfer in [u.transfer for u in self._under_way.values()] if self.tier.spans else []:
            while not transfer.done() and time.monotonic() < deadline:
                time.sleep(1e-4)
        wait(self._updating.values(), max(0.0, deadline - time.monotonic()))
