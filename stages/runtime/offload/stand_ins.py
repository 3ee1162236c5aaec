"""Makes what stands for offloaded and sharded tensors between their uses."""

from __future__ import annotations

import torch

from stowage.stages.device.events import noted_release
from stowage.stages.runtime.files.weights import absent


class StandIns:
    """Makes tensors without content, each in the memory of one number of its own: who reads it can be told its name."""

    def __init__(self) -> None:
        self._numbers: dict[str, torch.Tensor] = {}

    def of(self, name: str, like: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return a tensor with `like`'s shape and dtype; another one of that name has the same memory."""
        number = self._numbers.get(name)
        if number is None or (number.dtype, number.device) != (like.dtype, device):
            number = self._numbers[name] = absent(like.new_empty((), device="meta"), device)
        return number.expand(like.shape)

    def release(self) -> None:
        """Keep no memory but that of tensors which are in use."""
        while self._numbers:
            _, number = self._numbers.popitem()
            with noted_release(number):
                del number
