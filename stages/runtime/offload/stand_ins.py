"""Makes what stands for offloaded and sharded tensors between their uses."""

from __future__ import annotations

import torch

from stowage.stages.device.events import noted_release
from stowage.stages.runtime.files.weights import absent


class StandIns:
    """Makes tensors without content, which share the memory of one number for each type and device."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}

    def of(self, like: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return a tensor with `like`'s shape and dtype."""
        key = like.dtype, device
        if key not in self._numbers:
            self._numbers[key] = absent(like.new_empty((), device="meta"), device)
        return self._numbers[key].expand(like.shape)

    def release(self) -> None:
        """Keep no memory but that of tensors which are in use."""
        while self._numbers:
            _, number = self._numbers.popitem()
            with noted_release(number):
                del number
