"""Knows what is stored in which slot, and checks that a transfer fits it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from stowage.stages.device.tiers.layout import TransferLayout, layout_of
from stowage.stages.ir.errors import IllegalPlanError, StowageError


class Slots:
    """Sizes of slots and layouts of what is stored in them."""

    def __init__(self) -> None:
        self._nbytes: dict[str, int] = {}
        self._written: dict[str, TransferLayout] = {}

    def new(self, slots: Mapping[str, int]) -> dict[str, int]:
        """Return the slots that are not known yet.

        Raises:
            StowageError: a name is known with fewer bytes.
        """
        for name, nbytes in slots.items():
            if nbytes > self._nbytes.get(name, nbytes):
                raise StowageError(
                    f"The slot of '{name}' has {self._nbytes[name]} bytes and cannot grow to {nbytes}: reserve the "
                    "largest size first."
                )
        return {name: nbytes for name, nbytes in slots.items() if name not in self._nbytes}

    def add(self, slots: Mapping[str, int]) -> None:
        """Add new slots."""
        self._nbytes.update(slots)

    def drop(self, names: Iterable[str]) -> None:
        """Forget slots."""
        for name in names:
            self._nbytes.pop(name, None)
            self._written.pop(name, None)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Note that an offload into the slot starts."""
        layout = layout_of(tensor)
        if layout.nbytes > self._size(name):
            raise IllegalPlanError(
                f"Offload of '{name}': {layout.nbytes} bytes do not fit its slot of {self._nbytes[name]} bytes."
            )
        self._written[name] = layout

    def read(self, name: str, tensor: torch.Tensor) -> None:
        """Note that a reload from the slot starts, and check that it fits."""
        self._size(name)
        if name not in self._written:
            raise IllegalPlanError(f"Reload of '{name}': it was never offloaded.")
        layout, written = layout_of(tensor), self._written[name]
        if not layout.fits(written):
            raise IllegalPlanError(
                f"Reload of '{name}': {written.nbytes} bytes were offloaded with strides that the destination of "
                f"{layout.nbytes} bytes, shape {tuple(tensor.shape)}, strides {tensor.stride()} does not have."
            )

    def written(self, name: str) -> bool:
        """Return whether something was offloaded into the slot."""
        return name in self._written

    def _size(self, name: str) -> int:
        if name not in self._nbytes:
            raise IllegalPlanError(f"'{name}' has no slot: it was not reserved.")
        return self._nbytes[name]
