"""What a device can do, whatever it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

from stowage.stages.device.events import Measured
from stowage.stages.ir.costs import DeviceDescription


class Clock(Protocol):
    """Times several pieces of work that run one after the other, and does not come between them."""

    def run(self, work: Callable[[], Any]) -> None:
        """Run `work`; what it raises goes on, and it is not counted."""
        ...

    def seconds(self) -> list[float]:
        """Of each piece that ended, in order; waits until all have."""
        ...


class Device(Protocol):
    """The device tier: it runs operators, and its memory is the budget."""

    def describe(self, offload_folder: str) -> DeviceDescription:
        """Measure its rates and those of the disk behind `offload_folder`."""
        ...

    def fingerprint(self) -> str:
        """Hash of what identifies the device, without measuring."""
        ...

    def clock(self, calls: int) -> Clock:
        """For about so many calls of operators."""
        ...

    def time_s(self, work: Callable[[], Any], *, calls: int = 1) -> float:
        """Time of `work`, which makes about so many calls of operators, completed."""
        ...

    def evict(self, other_bytes: int) -> None:
        """Fill the caches with something else, as work on `other_bytes` does."""
        ...

    def measure(self, work: Callable[[], Any], resident: Iterable[torch.Tensor] = ()) -> Measured:
        """Run `work` and report the allocator's events; `resident` tensors existed before and may go away inside."""
        ...
