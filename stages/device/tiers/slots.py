"""What lies in which slot, and whether a transfer fits it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from stowage.stages.device.tiers.layout import Layout, layout_of
from stowage.stages.ir.errors import IllegalPlanError, StowageError


class Slots:
    """Sizes of slots and layouts of what was moved into them."""

    def __init__(self) -> None:
        self._nbytes: dict[str, int] = {}
        self._written: dict[str, Layout] = {}

    def new(self, slots: Mapping[str, int]) -> dict[str, int]:
        """Those that are not there yet.

        Raises:
            StowageError: a name is there with fewer bytes.
        """
        for name, nbytes in slots.items():
            if nbytes > self._nbytes.get(name, nbytes):
                raise StowageError(
                    f"The slot of '{name}' has {self._nbytes[name]} bytes and cannot grow to {nbytes}: reserve the "
                    "largest size first."
                )
        return {name: nbytes for name, nbytes in slots.items() if name not in self._nbytes}

    def add(self, slots: Mapping[str, int]) -> None:
        """Take up new ones."""
        self._nbytes.update(slots)

    def drop(self, names: Iterable[str]) -> None:
        """Forget slots."""
        for name in names:
            self._nbytes.pop(name, None)
            self._written.pop(name, None)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """An offload into the slot starts."""
        layout = layout_of(tensor)
        if layout.nbytes > self._size(name):
            raise IllegalPlanError(
                f"Offload of '{name}': {layout.nbytes} bytes do not fit its slot of {self._nbytes[name]} bytes."
            )
        self._written[name] = layout

    def read(self, name: str, tensor: torch.Tensor) -> None:
        """A reload from the slot starts."""
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
        """Whether something was moved into the slot."""
        return name in self._written

    def _size(self, name: str) -> int:
        if name not in self._nbytes:
            raise IllegalPlanError(f"'{name}' has no slot: it was not reserved.")
        return self._nbytes[name]
