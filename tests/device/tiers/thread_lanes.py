"""A GPU's streams and events as threads, on the CPU: host memory as a tier that really runs beside computing."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from stowage.stages.device.tiers import DiskTier, PinnedTier, StagedTier
from stowage.stages.device.tiers.base import Stream
from tests.device.tiers.moving import PAGE


class Event:
    """Complete once its stream has reached it."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.time_s = 0.0

    def reach(self) -> None:
        self.time_s = time.perf_counter()
        self.reached.set()


class ThreadLanes:
    """See `DeviceLanes`. The compute stream is the calling thread: what it does is done at once.

    Attributes:
        allocated: bytes of each buffer that was asked for.
    """

    kind = "cpu"

    def __init__(self) -> None:
        self.allocated: list[int] = []
        self._queues: dict[str, queue.SimpleQueue[Callable[[], object]]] = {}
        for stream in ("offload", "reload"):
            self._queues[stream] = queue.SimpleQueue()
            threading.Thread(target=_run, args=(self._queues[stream],), daemon=True).start()

    def pinned(self, nbytes: int) -> torch.Tensor:
        self.allocated.append(nbytes)
        memory = torch.zeros(nbytes + PAGE, dtype=torch.uint8)
        start = -memory.data_ptr() % PAGE
        return memory[start : start + nbytes]

    def compute(self) -> str:
        return "compute"

    def side(self, stream: Stream) -> str:
        return stream

    def record(self, stream: str) -> Event:
        event = Event()
        if stream == "compute":
            event.reach()
        else:
            self._queues[stream].put(event.reach)
        return event

    def wait(self, stream: str, event: Event) -> None:
        if stream == "compute":
            event.reached.wait()
        else:
            self._queues[stream].put(event.reached.wait)

    def copy(self, stream: str, destination: torch.Tensor, source: torch.Tensor) -> None:
        if stream == "compute":
            destination.copy_(source)
        else:
            self._queues[stream].put(lambda: destination.copy_(source))

    def done(self, event: Event) -> bool:
        return event.reached.is_set()

    def finish(self, event: Event) -> None:
        event.reached.wait()

    def give_back(self) -> None:
        """Nothing is kept."""

    def time_s(self, event: Event) -> float:
        return event.time_s

    def synchronize(self) -> None:
        for stream in self._queues:
            self.record(stream).reached.wait()


def _run(work: queue.SimpleQueue[Callable[[], object]]) -> None:
    while True:
        work.get()()


def staged(folder: Path, *, chunk_bytes: int = PAGE) -> StagedTier:
    """Host memory and a disk as on a machine with a GPU, here below the RAM."""
    return StagedTier(PinnedTier(lanes=ThreadLanes()), DiskTier(folder, chunk_bytes=chunk_bytes, lanes=ThreadLanes()))
