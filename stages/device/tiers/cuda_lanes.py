"""Streams and events of a GPU, behind the few calls that the pinned tier makes; tests put a model in their place."""

from __future__ import annotations

import math
import time
from typing import Any, Protocol

import torch

from stowage.stages.device.rates.host import give_back_pinned
from stowage.stages.device.tiers.base import Stream
from stowage.stages.ir.errors import StowageError, size_text

CLOCK_S = 10.0
"""A time of so many seconds is told to about a microsecond."""


class DeviceLanes(Protocol):
    """A compute stream, one stream for each direction, and events. Streams and events are the lanes' own business."""

    kind: str

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Flat bytes of host memory that the device can reach by itself."""
        ...

    def compute(self) -> Any:
        """The caller's current stream."""
        ...

    def side(self, stream: Stream) -> Any:
        """The stream of a direction."""
        ...

    def record(self, stream: Any) -> Any:
        """An event that is complete when all work so far on `stream` is."""
        ...

    def wait(self, stream: Any, event: Any) -> None:
        """Work put on `stream` from now on starts after the event."""
        ...

    def copy(self, stream: Any, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Put a copy on `stream`; return at once."""
        ...

    def done(self, event: Any) -> bool:
        """Whether an event is complete."""
        ...

    def finish(self, event: Any) -> None:
        """Return when an event is complete; other threads go on meanwhile."""
        ...

    def time_s(self, event: Any) -> float:
        """When a complete event was, on the clock of `time.perf_counter`."""
        ...

    def synchronize(self) -> None:
        """Return when both directions are idle."""
        ...

    def give_back(self) -> None:
        """Give memory of `pinned` that nobody holds any more back to the system."""
        ...


class CudaLanes:
    """See `DeviceLanes`."""

    kind = "cuda"

    def __init__(self, device: torch.device) -> None:
        if not torch.cuda.is_available():
            raise StowageError("The pinned tier needs a CUDA device, and there is none: use the disk tier.")
        stream: Any = torch.cuda.Stream
        if device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self._device = device
        self._sides: dict[Stream, Any] = {"offload": stream(device), "reload": stream(device)}
        self._zero: Any = None
        self._zero_s = -math.inf

    def pinned(self, nbytes: int) -> torch.Tensor:
        """See `DeviceLanes`."""
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        except RuntimeError as error:
            raise StowageError(
                f"No {size_text(nbytes)} ({nbytes} bytes) of pinned host memory can be had: lower the host "
                "budget, or raise the limit of locked memory."
            ) from error

    def compute(self) -> Any:
        """See `DeviceLanes`."""
        return torch.cuda.current_stream(self._device)

    def side(self, stream: Stream) -> Any:
        """See `DeviceLanes`."""
        return self._sides[stream]

    def record(self, stream: Any) -> Any:
        """See `DeviceLanes`."""
        event: Any = torch.cuda.Event
        made = event(enable_timing=True, blocking=True)  # who waits leaves the core to updates
        made.record(stream)
        return made

    def wait(self, stream: Any, event: Any) -> None:
        """See `DeviceLanes`."""
        stream.wait_event(event)

    def copy(self, stream: Any, destination: torch.Tensor, source: torch.Tensor) -> None:
        """See `DeviceLanes`."""
        with torch.cuda.stream(stream):
            destination.copy_(source, non_blocking=True)

    def done(self, event: Any) -> bool:
        """See `DeviceLanes`."""
        return bool(event.query())

    def finish(self, event: Any) -> None:
        """See `DeviceLanes`."""
        event.synchronize()

    def time_s(self, event: Any) -> float:
        """See `DeviceLanes`. Times between events are of 24 bits: the clock starts anew where it has run for long."""
        if time.perf_counter() - self._zero_s > CLOCK_S:
            event_kind: Any = torch.cuda.Event
            self._zero = event_kind(enable_timing=True)
            self._zero.record(self.compute())
            self._zero.synchronize()
            self._zero_s = time.perf_counter()
        return self._zero_s + 1e-3 * float(self._zero.elapsed_time(event))

    def synchronize(self) -> None:
        """See `DeviceLanes`."""
        for stream in self._sides.values():
            stream.synchronize()

    def give_back(self) -> None:
        """See `DeviceLanes`."""
        give_back_pinned()
