"""Knows which tensor of one model and its optimizer is where, and which slot of the lower tier it has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from stowage.stages.device.tiers import Tier
from stowage.stages.ir.plan import Slot
from stowage.stages.ir.updates import is_gradient_slot
from stowage.stages.runtime.offload.absence import Absent
from stowage.stages.runtime.offload.layout import Layout
from stowage.stages.runtime.offload.offloaded_tensor import arrive, leave
from stowage.stages.runtime.offload.stand_ins import StandIns


class Ledger:
    """Knows parameters, optimizer states, and gradients that wait, by the names of their slots.

    Optimizer states that do not exist yet (before the first update) need no memory: offloading them does nothing.
    """

    def __init__(self, tier: Tier, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        self.tier = tier
        self._parameters = dict(model.named_parameters())
        self._optimizer = optimizer
        self._slots: dict[str, Slot] = {}
        self._room: dict[str, int] = {}
        self._at: dict[str, str] = {}
        self._family: dict[str, list[str]] = {}
        self._layouts: dict[str, Layout] = {}
        self._offloaded: set[str] = set()
        self._copied: set[str] = set()
        self._absent = Absent()
        self._stand_ins = StandIns()
        self._touched = 0
        """Counts transfers and changes: if it is unchanged, everything is where the last iteration left it."""

    def adopt(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Let parameters outside of the model that a step reads be offloaded too."""
        self._parameters.update(parameters)  # type: ignore[arg-type]

    def _tensor(self, name: str) -> torch.Tensor | None:
        """Return a parameter; or a state, or a gradient that waits, if it exists."""
        owned = self._parameters.get(name)
        if owned is not None:
            return owned
        parameter, _, state = name.partition("::")
        if is_gradient_slot(name):
            return self._parameters[parameter].grad
        assert self._optimizer is not None
        found: Any = self._optimizer.state.get(self._parameters[parameter], {}).get(state)
        return found if isinstance(found, torch.Tensor) else None

    def has_slot(self, name: str) -> bool:
        """Return whether a parameter or state can be offloaded."""
        return name in self._slots

    def like(self, name: str) -> torch.Tensor:
        """Return shape, strides and dtype of a parameter or state as a meta tensor, wherever its content is."""
        if name in self._offloaded:
            return self._layouts[name].meta()
        owned = self._tensor(name)
        assert owned is not None
        return Layout.of(owned).meta()

    def layouts(self) -> dict[str, torch.Tensor]:
        """Return offloaded parameters as tensors on the meta device, which are all that a trace needs of them."""
        return {n: self._layouts[n].meta() for n in self._offloaded if n in self._parameters}

    def _reserve(self, slots: Sequence[Slot]) -> None:
        """Reserve room in the tier for each slot.

        Activations of another batch's program have the same names, and other sizes: the largest has room for all, and
        none is needed between iterations.
        """
        spent: list[str] = []
        for slot in slots:
            place = self._at.setdefault(slot.name, slot.name)
            if self._room.get(place, slot.nbytes) < slot.nbytes:
                self._at[slot.name] = f"{slot.name} of {slot.nbytes} bytes"
                if slot.role == "temporary":
                    spent.append(place)
            if slot.name not in self._slots:
                self._family.setdefault(slot.name.partition("::")[0], []).append(slot.name)
        if spent:
            self.tier.release(spent)
            for place in spent:
                del self._room[place]
        fresh = {self._at[s.name]: s.nbytes for s in slots if self._at[s.name] not in self._room}
        if fresh:
            on_disk = [self._at[s.name] for s in slots if s.placement == "disk" and self._at[s.name] in fresh]
            self.tier.reserve(fresh, on_disk)
            self._room.update(fresh)
        self._slots.update({s.name: s for s in slots})

    def changed(self, parameter: str) -> None:
        """Mark the copies of a parameter and its states in the lower tier as out of date."""
        self._touched += 1
        self._copied.difference_update(self._family.get(parameter, ()))

    def forget_copies(self, names: Iterable[str]) -> None:
        """Mark copies in the lower tier as out of date, because someone may have changed the tensors on the device."""
        self._touched += 1
        self._copied.difference_update(names)

    def _nothing(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the stand-in of an offloaded tensor."""
        return self._stand_ins.of(name, tensor, tensor.device)

    def _found(self, name: str) -> None:
        """Note that the tensor's content is on the device, or about to be."""
        if name in self._offloaded:
            self._offloaded.discard(name)
            tensor = self._tensor(name)
            if tensor is not None:
                arrive(tensor)
        if name in self._parameters:
            self._absent.discard(self._parameters[name])

    def _stand_in(self, name: str, device: torch.device) -> torch.Tensor:
        nothing = self._stand_ins.of(name, self._layouts[name].meta(), device)
        leave(nothing, name)
        return nothing
