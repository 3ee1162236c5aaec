"""Lanes that are late, so that a missing wait shows in the numbers; and lanes of a machine without a GPU.

A late copy starts when whoever should wait for it has long gone on, and what it will overwrite reads as NaN until then.
A late compute stream has not made yet what a copy takes, and has not read yet what a copy overwrites.
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
"""Bytes of this are NaN in every floating type."""

CALIBRATION_CYCLES = 10_000_000


def sleep(cycles: int) -> None:
    """Queue a kernel on the current stream that does nothing for so many cycles of the card."""
    queued: Any = torch.cuda._sleep
    queued(cycles)


class LateCudaLanes(CudaLanes):
    """See `DeviceLanes`: kernels that do nothing for a while are queued before copies, or on the compute stream."""

    def __init__(self, device: torch.device, late: Collection[Late], seconds: float) -> None:
        super().__init__(device)
        self._late = frozenset(late)
        self._cycles = max(1, int(seconds * cycles_per_s(device)))

    def compute(self) -> Any:
        """See `DeviceLanes`. What is queued before is what the sleep delays from the second call on."""
        current = super().compute()
        if "compute" in self._late:
            with torch.cuda.stream(current):
                sleep(self._cycles)
        return current

    def copy(self, stream: Any, destination: torch.Tensor, source: torch.Tensor) -> None:
        """See `DeviceLanes`."""
        for direction in (OFFLOAD, RELOAD):
            if direction in self._late and stream is self.side(direction):
                with torch.cuda.stream(stream):
                    if direction == RELOAD:
                        destination.fill_(GARBAGE)
                    sleep(self._cycles)
        super().copy(stream, destination, source)


def cycles_per_s(device: torch.device) -> float:
    """Of what `torch.cuda._sleep` counts, at the clock of now."""
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
    """Complete once its stream has reached it."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.time_s = 0.0

    def reach(self) -> None:
        self.time_s = time.perf_counter()
        self.reached.set()


class HostLanes:
    """See `DeviceLanes`, without a GPU: each direction is a thread that works through a queue, and the compute stream
    is the calling thread, whose work is done at once. Late directions sleep before each copy; a late compute stream
    sleeps where it is asked for. What a copy reads stays in memory until it is done, so an offload that nobody waits
    for shows on a card alone, which hands such memory out again."""

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
        """See `DeviceLanes`."""
        return torch.empty(nbytes, dtype=torch.uint8)

    def compute(self) -> Any:
        """See `DeviceLanes`."""
        if "compute" in self._late:
            time.sleep(self._seconds)
        return "compute"

    def side(self, stream: Stream) -> Any:
        """See `DeviceLanes`."""
        return stream

    def record(self, stream: Any) -> Any:
        """See `DeviceLanes`."""
        event = _Event()
        self._put(stream, event.reach)
        return event

    def wait(self, stream: Any, event: Any) -> None:
        """See `DeviceLanes`."""
        self._put(stream, event.reached.wait)

    def copy(self, stream: Any, destination: torch.Tensor, source: torch.Tensor) -> None:
        """See `DeviceLanes`."""

        def work() -> None:
            if stream in self._late:
                time.sleep(self._seconds)
            destination.copy_(source)

        if stream == RELOAD and stream in self._late:
            destination.fill_(GARBAGE)  # from the call on, whatever the thread is at
        self._put(stream, work)

    def done(self, event: Any) -> bool:
        """See `DeviceLanes`."""
        return bool(event.reached.is_set())

    def finish(self, event: Any) -> None:
        """See `DeviceLanes`."""
        event.reached.wait()

    def give_back(self) -> None:
        """See `DeviceLanes`. Nothing is kept."""

    def time_s(self, event: Any) -> float:
        """See `DeviceLanes`."""
        return float(event.time_s)

    def synchronize(self) -> None:
        """See `DeviceLanes`."""
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
    """Of a kind of device; on time where `late` is empty."""
    if kind != "cuda":
        return HostLanes(late, seconds)
    device = torch.device("cuda", torch.cuda.current_device())
    return LateCudaLanes(device, late, seconds) if late else CudaLanes(device)
