"""Defines what a device can do, whatever it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

from stowage.stages.device.events import Measured
from stowage.stages.ir.costs import DeviceDescription


class Clock(Protocol):
    """Times several pieces of work that run one after the other, without a pause between them."""

    def run(self, work: Callable[[], Any]) -> None:
        """Run `work`; if it raises, the error is passed on and the time is not counted."""
        ...

    def seconds(self) -> list[float]:
        """Return the seconds of each piece that ended, in order; wait until all have."""
        ...


class Device(Protocol):
    """Runs operators; its memory is what the budget limits."""

    def describe(self, offload_folder: str) -> DeviceDescription:
        """Measure the device's rates and those of the disk behind `offload_folder`."""
        ...

    def fingerprint(self) -> str:
        """Return a hash of what identifies the device, without measuring."""
        ...

    def clock(self, calls: int) -> Clock:
        """Return a clock for about so many calls of operators."""
        ...

    def time_s(self, work: Callable[[], Any], *, calls: int = 1) -> float:
        """Return the time of `work`, which makes about so many calls of operators, until it is complete."""
        ...

    def evict(self, other_bytes: int) -> None:
        """Fill the caches with something else, as work on `other_bytes` does."""
        ...

    def measure(self, work: Callable[[], Any], resident: Iterable[torch.Tensor] = ()) -> Measured:
        """Run `work` and report the allocator's events; it may release `resident` tensors, which existed before."""
        ...
