"""Wraps a GPU's streams and events in the few calls that the pinned tier makes; tests put a model in their place."""

from __future__ import annotations

import math
import time
from typing import Any, Protocol

import torch

from stowage.stages.device.rates.host import give_back_pinned
from stowage.stages.device.tiers.base import Stream
from stowage.stages.ir.errors import StowageError, size_text

CLOCK_S = 10.0
"""Seconds after which the clock starts anew: a time that long is known to about a microsecond."""


class DeviceLanes(Protocol):
    """A compute stream, one stream for each direction, and events; callers pass streams and events on as they are."""

    kind: str

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Return flat bytes of host memory that the device can reach by itself."""
        ...

    def compute(self) -> Any:
        """Return the caller's current stream."""
        ...

    def side(self, stream: Stream) -> Any:
        """Return the stream of a direction."""
        ...

    def record(self, stream: Any) -> Any:
        """Return an event that is complete when all work so far on `stream` is."""
        ...

    def wait(self, stream: Any, event: Any) -> None:
        """Let work that is put on `stream` from now on start after the event."""
        ...

    def copy(self, stream: Any, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Put a copy on `stream`; return at once."""
        ...

    def done(self, event: Any) -> bool:
        """Return whether an event is complete."""
        ...

    def finish(self, event: Any) -> None:
        """Return when an event is complete; other threads run meanwhile."""
        ...

    def time_s(self, event: Any) -> float:
        """Return when a complete event was, on the clock of `time.perf_counter`."""
        ...

    def synchronize(self) -> None:
        """Return when both directions are idle."""
        ...

    def give_back(self) -> None:
        """Give memory of `pinned` that is no longer used back to the system."""
        ...


class CudaLanes:
    """The `DeviceLanes` of a GPU."""

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
        """Implement `DeviceLanes.pinned`."""
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        except RuntimeError as error:
            raise StowageError(
                f"No {size_text(nbytes)} ({nbytes} bytes) of pinned host memory can be had: lower the host "
                "budget, or raise the limit of locked memory."
            ) from error

    def compute(self) -> Any:
        """Implement `DeviceLanes.compute`."""
        return torch.cuda.current_stream(self._device)

    def side(self, stream: Stream) -> Any:
        """Implement `DeviceLanes.side`."""
        return self._sides[stream]

    def record(self, stream: Any) -> Any:
        """Implement `DeviceLanes.record`."""
        event: Any = torch.cuda.Event
        made = event(enable_timing=True, blocking=True)  # a waiting thread leaves the core to updates
        made.record(stream)
        return made

    def wait(self, stream: Any, event: Any) -> None:
        """Implement `DeviceLanes.wait`."""
        stream.wait_event(event)

    def copy(self, stream: Any, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Implement `DeviceLanes.copy`."""
        with torch.cuda.stream(stream):
            destination.copy_(source, non_blocking=True)

    def done(self, event: Any) -> bool:
        """Implement `DeviceLanes.done`."""
        return bool(event.query())

    def finish(self, event: Any) -> None:
        """Implement `DeviceLanes.finish`."""
        event.synchronize()

    def time_s(self, event: Any) -> float:
        """Implement `DeviceLanes.time_s`; times between events have 24 bits, so the clock starts anew after a while."""
        if time.perf_counter() - self._zero_s > CLOCK_S:
            event_kind: Any = torch.cuda.Event
            self._zero = event_kind(enable_timing=True)
            self._zero.record(self.compute())
            self._zero.synchronize()
            self._zero_s = time.perf_counter()
        return self._zero_s + 1e-3 * float(self._zero.elapsed_time(event))

    def synchronize(self) -> None:
        """Implement `DeviceLanes.synchronize`."""
        for stream in self._sides.values():
            stream.synchronize()

    def give_back(self) -> None:
        """Implement `DeviceLanes.give_back`."""
        give_back_pinned()
