"""Puts tensors where a plan expects them between iterations, and reloads them for others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from stowage.stages.device.heap import ResidentLimit
from stowage.stages.device.tiers import Tier
from stowage.stages.ir.plan import Slot
from stowage.stages.ir.updates import gradient_slot, is_gradient_slot
from stowage.stages.runtime.offload.updating import Updating


class Placing(Updating):
    """Transfers one tensor after the other, and waits for each."""

    def __init__(
        self,
        tier: Tier,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        resident: ResidentLimit | None = None,
    ) -> None:
        super().__init__(tier, model, optimizer, resident)
        self._settled: Sequence[Slot] | None = None
        self._rest: tuple[Sequence[Slot], int] | None = None

    def populate(self, tensors: Iterable[tuple[str, torch.Tensor]], slots: Sequence[Slot]) -> None:
        """Give parameters their first values, one after the other, and put each at once where `slots` want it."""
        self._reserve(slots)
        by_name = {s.name: s for s in slots}
        for name, tensor in tensors:
            self._parameters[name].data = tensor
            if name in by_name:
                self.place(by_name[name])

    def enter(self, slots: Sequence[Slot]) -> None:
        """Put every parameter and state where its plan expects it, before an iteration.

        After an iteration of the same plan they are there already; if that was seen once, and nothing was touched since
        then, it is not checked again.
        """
        if self._rest is not None and self._rest[0] is slots and self._rest[1] == self._touched:
            return
        verbs = self._touched
        self._reserve(slots)
        persistent = [s for s in slots if s.role != "temporary"]
        planned = {s.name for s in persistent}
        for slot in persistent:
            if slot.start in ("offloaded", "updating"):  # offloading first makes room for what is reloaded
                self.place(slot)
        self._forget_gradients()
        for name in sorted((self._offloaded | set(self._under_way)) - planned):
            if not is_gradient_slot(name):  # a gradient is reloaded when it is asked for
                self.fetch(name)
        for slot in persistent:
            self.place(slot)
        in_place = verbs == self._touched and all(self._tensor(name) is not None for name in planned)
        self._settled = slots if in_place and not any(map(is_gradient_slot, planned)) else None

    def rest(self, slots: Sequence[Slot]) -> None:
        """Note that an iteration that began with `enter` has ended as its plan says."""
        self._rest = (slots, self._touched) if self._settled is slots else None

    def place(self, slot: Slot) -> None:
        """Put one parameter, state or gradient where its slot has it between iterations."""
        name, start = slot.name, slot.start
        if self.where(name) == "device" and (start == "reloading" or (start == "offloading" and name in self._copied)):
            start = "device"  # the copy that the plan leaves under way has ended
        if self._tensor(name) is None or (self.where(name) == start and (not slot.copied or name in self._copied)):
            return
        self.settle(name)
        if (slot.copied or start in ("offloaded", "reloading", "updating")) and name not in self._copied:
            self.offload(name)
            self.wait(name)
        if start in ("offloaded", "reloading", "updating") and name not in self._offloaded:
            self.free(name)
        if start in ("device", "offloading"):
            self.fetch(name)
        if start == "offloading":
            self.offload(name)
        if start == "reloading":
            self.reload(name)

    def settle(self, name: str) -> None:
        """Wait for the copy or update of one tensor, if there is one."""
        if name.partition("::")[0] in self._updating:
            self._updated(name.partition("::")[0])
        if name in self._under_way:
            self.wait(name)

    def settle_all(self) -> None:
        """Wait for all copies and updates."""
        for name in [*self._updating, *self._under_way]:
            self.wait(name)

    def fetch(self, name: str) -> None:
        """Reload a parameter or state and wait."""
        self.settle(name)
        if name in self._offloaded:
            self.reload(name)
            self.wait(name)

    def fetch_all(self, names: Iterable[str] | None = None) -> list[str]:
        """Reload parameters and states, whatever the budget: by default all, whose names are returned."""
        self.settle_all()
        wanted = sorted(self._slots) if names is None else list(names)
        for name in wanted:
            self.fetch(name)
        return wanted

    def send_down(self, name: str) -> None:
        """Drop the device's copy of a parameter or state, after offloading it where it has no valid copy."""
        self.settle(name)
        if name in self._offloaded:
            return
        if name not in self._copied:
            self.offload(name)
            self.wait(name)
        self.free(name)

    def make_room(self, nbytes: int) -> None:
        """Offload what has a slot, until `nbytes` more fit into what the plan has on the device between iterations.

        If everything is offloaded and that is not enough, `nbytes` are of one tensor, which the plan has here at some
        time anyway: the budget is kept.
        """
        self.settle_all()
        persistent = [s for s in self._slots.values() if s.role != "temporary"]
        limit = sum(s.nbytes for s in persistent if s.start != "offloaded")
        here = [s for s in persistent if s.name not in self._offloaded and self._tensor(s.name) is not None]
        used = sum(s.nbytes for s in here)
        for slot in sorted(here, key=lambda s: (s.name not in self._copied, -s.nbytes)):
            if used + nbytes <= limit:
                return
            self.send_down(slot.name)
            used -= slot.nbytes

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Set new content for a parameter or a state, and put it at once where the plan has it between iterations."""
        self._touched += 1
        self.settle(name)
        self._found(name)
        self._copied.discard(name)
        parameter, double_colon, state = name.partition("::")
        if double_colon:
            assert self._optimizer is not None
            self._optimizer.state[self._parameters[parameter]][state] = tensor
        else:
            self._parameters[parameter].data = tensor
        if name in self._slots:
            self.place(self._slots[name])

    def keep_gradient(self, parameter: str) -> None:
        """Put a stand-in for an offloaded gradient into `.grad`; the gradient stays offloaded."""
        self._touched += 1
        name, weight = gradient_slot(parameter), self._parameters[parameter]
        weight.grad = self._stand_in(name, weight.device)
        self._offloaded.add(name)

    def _forget_gradients(self) -> None:
        """Forget gradients that someone has dropped meanwhile, as `zero_grad` does."""
        for name in [n for n in self._offloaded | self._copied if is_gradient_slot(n)]:
            if self._tensor(name) is None:
                self._offloaded.discard(name)
                self._copied.discard(name)

    def forget_states(self) -> None:
        """Forget the optimizer's states, which are about to be replaced."""
        self._touched += 1
        self.settle_all()
        for name in [n for n in self._layouts if "::" in n and not is_gradient_slot(n)]:
            self._offloaded.discard(name)
            self._copied.discard(name)
            del self._layouts[name]
