"""What a device can do, whatever it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

from stowage.stages.device.events import Measured
from stowage.stages.ir.costs import DeviceDescription

MEASURING = "in the order of the step, without what clocks add, of weights as models start with"
"""How calls are measured: costs measured otherwise are of another device."""


class Device(Protocol):
    """The device tier: it runs operators, and its memory is the budget."""

    def describe(self, offload_folder: str) -> DeviceDescription:
        """Measure its rates and those of the disk behind `offload_folder`."""
        ...

    def fingerprint(self) -> str:
        """Hash of what identifies the device, without measuring."""
        ...

    def time_s(self, work: Callable[[], Any]) -> float:
        """Wall time of `work`, completed."""
        ...

    def evict(self, other_bytes: int) -> None:
        """Fill the caches with something else, as work on `other_bytes` does."""
        ...

    def measure(self, work: Callable[[], Any], resident: Iterable[torch.Tensor] = ()) -> Measured:
        """Run `work` and report the allocator's events; `resident` tensors existed before and may go away inside."""
        ...
