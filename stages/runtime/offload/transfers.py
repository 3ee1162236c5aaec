"""Transfers tensors between the device and the lower tier: offload, reload, wait and free."""

from __future__ import annotations

import torch
from torch import nn

from stowage.stages.device.events import noted_release
from stowage.stages.device.heap import ResidentLimit
from stowage.stages.device.tiers import Tier, Transfer
from stowage.stages.ir.errors import IllegalPlanError
from stowage.stages.ir.machine import DISK_ALIGNMENT_BYTES
from stowage.stages.runtime.offload.layout import Layout, UnderWay
from stowage.stages.runtime.offload.ledger import Ledger
from stowage.stages.runtime.offload.offloaded_tensor import leave


class Transfers(Ledger):
    """Starts copies, and waits for them."""

    def __init__(
        self,
        tier: Tier,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        resident: ResidentLimit | None = None,
    ) -> None:
        """Take a tier; `resident` limits what the process may occupy, where the device is its own memory."""
        super().__init__(tier, model, optimizer)
        self._resident = resident
        self._alignment = tier.memory_alignment if tier.memory_alignment <= DISK_ALIGNMENT_BYTES else 0
        self._under_way: dict[str, UnderWay] = {}

    def offload(self, name: str, activation: torch.Tensor | None = None) -> None:
        """Start copying a parameter, a state or an activation to the lower tier."""
        tensor = self._tensor(name) if activation is None else activation
        if tensor is None:
            return
        self._touched += 1
        self.keep_to_limit()
        self._layouts[name] = Layout.of(tensor)
        self._under_way[name] = UnderWay("offloading", self.tier.offload(self._at[name], tensor), tensor)

    def reload(self, name: str) -> None:
        """Start copying to the device, into memory that is taken now."""
        if name not in self._layouts:
            return
        self._touched += 1
        if self._resident is not None:
            self._resident.check()
        tensor = self._layouts[name].empty(self._alignment)
        self._under_way[name] = UnderWay("reloading", self.tier.reload(self._at[name], tensor), tensor)

    def wait(self, name: str) -> torch.Tensor | None:
        """Wait for the copy of `name`; return what was reloaded. Parameters and states are in their place then."""
        self._touched += 1
        under_way = self._under_way.pop(name, None)
        if under_way is None:
            return None
        if self._resident is not None:
            self._resident.check()
        under_way.transfer.wait()
        if under_way.direction == "offloading":
            self._copied.add(name)
            return None
        self._found(name)
        if self._slots[name].role != "temporary":
            target = self._tensor(name)
            assert target is not None
            target.data = under_way.tensor
        return under_way.tensor

    def free(self, name: str) -> None:
        """Drop the device's copy of a parameter or state."""
        tensor = self._tensor(name)
        if tensor is None:
            return
        if name not in self._copied:
            raise IllegalPlanError(f"{name} would be lost: its copy in the lower tier is not up to date")
        self._touched += 1
        nothing = self._nothing(name, tensor)
        if torch._C._autograd._profiler_enabled():
            with noted_release(tensor):
                tensor.data = nothing
        else:
            tensor.data = nothing
        self._offloaded.add(name)
        leave(tensor, name)
        if name in self._parameters:
            self._absent.add(tensor, name)

    def keep_to_limit(self) -> None:
        """Give freed memory back to the system if the process occupies more than it may."""
        if self._resident is not None:
            self._resident.check()

    def allow(self, more_bytes: int) -> None:
        """Raise the limit, because the budget has grown."""
        if self._resident is not None:
            self._resident.limit_bytes += more_bytes

    def in_flight(self) -> list[torch.Tensor]:
        """Return device memory that reloads have taken and that nobody waited for yet."""
        return [u.tensor for u in self._under_way.values() if u.direction == "reloading"]

    def peek(self, name: str) -> torch.Tensor:
        """Return a copy of what is offloaded, in new device memory; the tensor stays offloaded."""
        tensor = self._layouts[name].empty()
        self.tier.reload(self._at[name], tensor).wait()
        return tensor

    def transfers(self) -> dict[str, Transfer]:
        """Return copies that nobody has waited for yet, by name."""
        return {name: under_way.transfer for name, under_way in self._under_way.items()}
