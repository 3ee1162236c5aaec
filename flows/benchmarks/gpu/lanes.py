"""Delays lanes, so that a missing wait shows in the numbers; and replaces lanes on a machine without a GPU.

A late copy starts long after whoever should wait for it would have continued, and what it will overwrite reads as NaN
until then. A late compute stream has not made yet what a copy takes, and has not read yet what a copy overwrites.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Collection
from typing import Any, Literal

import torch

from stowage.stages.device.tiers import OFFLOAD, RELOAD
from stowage.stages.device.tiers.base import Stream
from stowage.stages.device.tiers.cuda_lanes import CudaLanes, DeviceLanes

Late = Literal["offload", "reload", "compute"]

GARBAGE = 0xFF
"""Byte whose repetition is NaN in every floating type."""

CALIBRATION_CYCLES = 10_000_000
"""Cycles of the sleep that is timed to learn the card's clock."""


def sleep(cycles: int) -> None:
    """Queue a kernel on the current stream that does nothing for so many cycles of the card."""
    queued: Any = torch.cuda._sleep
    queued(cycles)


class LateCudaLanes(CudaLanes):
    """Lanes of a GPU that queue kernels which do nothing for a while before copies, or on the compute stream."""

    def __init__(self, device: torch.device, late: Collection[Late], seconds: float) -> None:
        super().__init__(device)
        self._late = frozenset(late)
        self._cycles = max(1, int(seconds * cycles_per_s(device)))

    def compute(self) -> Any:
        """Return the compute stream, after queuing a sleep on it; from the second call on this delays earlier work."""
        current = super().compute()
        if "compute" in self._late:
            with torch.cuda.stream(current):
                sleep(self._cycles)
        return current

    def copy(self, stream: Any, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy; a late one sleeps first, and a late reload fills its destination with garbage before."""
        for direction in (OFFLOAD, RELOAD):
            if direction in self._late and stream is self.side(direction):
                with torch.cuda.stream(stream):
                    if direction == RELOAD:
                        destination.fill_(GARBAGE)
                    sleep(self._cycles)
        super().copy(stream, destination, source)


def cycles_per_s(device: torch.device) -> float:
    """Return how many cycles per second `torch.cuda._sleep` counts, at the present clock."""
    event: Any = torch.cuda.Event
    start, end = event(enable_timing=True), event(enable_timing=True)
    with torch.cuda.device(device):
        sleep(CALIBRATION_CYCLES)  # it also wakes the card
        start.record()
        sleep(CALIBRATION_CYCLES)
        end.record()
        end.synchronize()
    return CALIBRATION_CYCLES / max(1e-9, 1e-3 * float(start.elapsed_time(end)))


class _Event:
    """An event that is complete once its stream has reached it."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.time_s = 0.0

    def reach(self) -> None:
        self.time_s = time.perf_counter()
        self.reached.set()


class HostLanes:
    """Lanes without a GPU, with the interface of `DeviceLanes`.

    Each direction is a thread that works through a queue, and the compute stream is the calling thread, whose work is
    done
    at once. Late directions sleep before each copy; a late compute stream sleeps where it is asked for. What a copy
    reads
    stays in memory until it is done, so an offload that nobody waits for shows on a card alone, which hands such memory
    out
    again.
    """

    kind = "cpu"

    def __init__(self, late: Collection[Late] = (), seconds: float = 0.0) -> None:
        self._late = frozenset(late)
        self._seconds = seconds
        self._queues: dict[str, queue.SimpleQueue[Callable[[], object]]] = {}
        for direction in (OFFLOAD, RELOAD):
            self._queues[direction] = queue.SimpleQueue()
            threading.Thread(
                target=_work, args=(self._queues[direction],), name=f"stowage-{direction}", daemon=True
            ).start()

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Return ordinary memory in place of pinned."""
        return torch.empty(nbytes, dtype=torch.uint8)

    def compute(self) -> Any:
        """Return the compute stream's name; a late one sleeps first."""
        if "compute" in self._late:
            time.sleep(self._seconds)
        return "compute"

    def side(self, stream: Stream) -> Any:
        """Return a direction's name as its stream."""
        return stream

    def record(self, stream: Any) -> Any:
        """Record an event on a stream."""
        event = _Event()
        self._put(stream, event.reach)
        return event

    def wait(self, stream: Any, event: Any) -> None:
        """Let a stream wait for an event."""
        self._put(stream, event.reached.wait)

    def copy(self, stream: Any, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy; a late one sleeps first, and a late reload fills its destination with garbage at once."""

        def work() -> None:
            if stream in self._late:
                time.sleep(self._seconds)
            destination.copy_(source)

        if stream == RELOAD and stream in self._late:
            destination.fill_(GARBAGE)  # at once, not when the thread comes to this copy
        self._put(stream, work)

    def done(self, event: Any) -> bool:
        """Return whether an event is complete."""
        return bool(event.reached.is_set())

    def finish(self, event: Any) -> None:
        """Wait for an event."""
        event.reached.wait()

    def give_back(self) -> None:
        """Do nothing: no memory is cached."""

    def time_s(self, event: Any) -> float:
        """Return the time at which an event was reached."""
        return float(event.time_s)

    def synchronize(self) -> None:
        """Wait for everything that is queued."""
        for stream in self._queues:
            self.finish(self.record(stream))

    def _put(self, stream: str, work: Callable[[], object]) -> None:
        if stream in self._queues:
            self._queues[stream].put(work)
        else:
            work()


def _work(todo: queue.SimpleQueue[Callable[[], object]]) -> None:
    while True:
        todo.get()()


def late_lanes(kind: str, late: Collection[Late], seconds: float) -> DeviceLanes:
    """Make the lanes of a kind of device; on time where `late` is empty."""
    if kind != "cuda":
        return HostLanes(late, seconds)
    device = torch.device("cuda", torch.cuda.current_device())
    return LateCudaLanes(device, late, seconds) if late else CudaLanes(device)
