"""Describes a tensor while it is offloaded, and a copy that is under way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from stowage.stages.device.tiers import Transfer


@dataclass(frozen=True)
class UnderWay:
    """A copy between the device and the lower tier, until it is waited for."""

    direction: Literal["offloading", "reloading"]
    transfer: Transfer
    tensor: torch.Tensor


@dataclass(frozen=True)
class Layout:
    """Shape, strides, dtype and device of a tensor, kept while it is offloaded."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(tensor: torch.Tensor) -> Layout:
        """Return the layout of a tensor that is on the device."""
        return Layout(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)

    def empty(self, alignment: int = 0) -> torch.Tensor:
        """Return memory for a tensor of this layout; on the CPU with an address that `alignment` divides."""
        if not alignment or self.device.type != "cpu":
            return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)
        span = 1 + sum((n - 1) * s for n, s in zip(self.shape, self.stride)) if all(self.shape) else 0
        memory = torch.empty(span * self.dtype.itemsize + alignment, dtype=torch.uint8, device="cpu").untyped_storage()
        start = -memory.data_ptr() % alignment
        part: Any = memory[start : start + span * self.dtype.itemsize]
        return torch.empty(0, dtype=self.dtype, device="cpu").set_(part, 0, self.shape, self.stride)

    def meta(self) -> torch.Tensor:
        """Return a tensor of this layout on the meta device."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
