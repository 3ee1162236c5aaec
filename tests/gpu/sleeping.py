"""Streams that lag behind: an order that is kept by luck alone is lost on them.

`cuda_lanes` puts `torch.cuda._sleep` on a stream, a kernel that counts the clock's cycles; `thread_lanes` lets the
thread sleep that stands for a stream on the CPU.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any, Literal

import torch

from stowage.stages.device.tiers import PinnedTier
from stowage.stages.device.tiers.cuda_lanes import CudaLanes
from tests.device.tiers.thread_lanes import ThreadLanes

Late = Literal["offload", "reload", "compute"]

CYCLES = 2_000_000
"""Of a sleep on a GPU: about one millisecond."""

SECONDS = 5e-4
"""Of a sleep on the CPU."""


class SleepingCudaLanes(CudaLanes):
    """A sleep before each copy of one direction, or before each event of the compute stream that copies wait for."""

    def __init__(self, device: torch.device, late: Late) -> None:
        self._late: str = late
        super().__init__(device)

    def record(self, stream: Any) -> Any:
        """See `DeviceLanes`."""
        if self._late == "compute" and stream not in self._sides.values():
            self._sleep(stream)
        return super().record(stream)

    def copy(self, stream: Any, destination: torch.Tensor, source: torch.Tensor) -> None:
        """See `DeviceLanes`."""
        if stream == self._sides.get(self._late):  # type: ignore[call-overload]
            self._sleep(stream)
        super().copy(stream, destination, source)

    def _sleep(self, stream: Any) -> None:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(CYCLES)


class SleepingThreadLanes(ThreadLanes):
    """The same with threads. Computing is the caller's: it sleeps where events of it are recorded."""

    def __init__(self, late: Late) -> None:
        self._late = late
        super().__init__()

    def record(self, stream: str) -> Any:
        """See `DeviceLanes`."""
        if stream == self._late == "compute":
            time.sleep(SECONDS)
        return super().record(stream)

    def copy(self, stream: str, destination: torch.Tensor, source: torch.Tensor) -> None:
        """See `DeviceLanes`."""
        if stream == self._late and stream in self._queues:
            self._queues[stream].put(partial(time.sleep, SECONDS))
        super().copy(stream, destination, source)


def sleeping_tier(device: str, late: Late) -> PinnedTier:
    """Host memory below a device, with one stream that lags behind."""
    lanes = SleepingThreadLanes(late) if device == "cpu" else SleepingCudaLanes(torch.device(device), late)
    return PinnedTier(device, lanes=lanes)
