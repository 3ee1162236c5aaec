"""A GPU's streams and events as queues that run in any order the events allow."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from stowage.stages.device.tiers.base import Stream


class Event:
    """Complete once its place in a stream is reached."""

    def __init__(self) -> None:
        self.complete = False
        self.place = -1


class ModelLanes:
    """See `DeviceLanes`. Nothing happens before `drain`: the host is ahead of the device by as much as can be.

    `choose` picks, among the streams that can go on, whose next work is done. `ignored` holds (stream, other stream):
    waits of one for the other are forgotten, to show that they are needed. Threads take turns.
    """

    kind = "cpu"

    def __init__(self, choose: Callable[[list[str]], str]) -> None:
        self.queues: dict[str, deque[Any]] = {"compute": deque(), "offload": deque(), "reload": deque()}
        self.ignored: set[tuple[str, str]] = set()
        self._choose = choose
        self._places = 0
        self._source: dict[Event, str] = {}
        self._turn = threading.RLock()

    def pinned(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)

    def compute(self) -> str:
        return "compute"

    def side(self, stream: Stream) -> str:
        return stream

    def record(self, stream: str) -> Event:
        event = Event()
        with self._turn:
            self._source[event] = stream
            self.queues[stream].append(lambda: self._reach(event))
        return event

    def _reach(self, event: Event) -> None:
        event.complete, event.place = True, self._places
        self._places += 1

    def wait(self, stream: str, event: Event) -> None:
        if (stream, self._source[event]) not in self.ignored:
            with self._turn:
                self.queues[stream].append(event)

    def copy(self, stream: str, destination: torch.Tensor, source: torch.Tensor) -> None:
        with self._turn:
            self.queues[stream].append(lambda: destination.copy_(source))

    def run(self, work: Callable[[], object]) -> None:
        """A kernel on the compute stream."""
        with self._turn:
            self.queues["compute"].append(work)

    def done(self, event: Event) -> bool:
        return event.complete

    def finish(self, event: Event) -> None:
        while not event.complete:
            self._one()

    def give_back(self) -> None:
        """Nothing is kept."""

    def time_s(self, event: Event) -> float:
        return float(event.place)

    def synchronize(self) -> None:
        self.drain()

    def drain(self) -> None:
        """Do all work."""
        while any(self.queues.values()):
            self._one()

    def _one(self) -> None:
        with self._turn:
            ready = [name for name, q in self.queues.items() if q and (not isinstance(q[0], Event) or q[0].complete)]
            if not ready:
                assert not any(self.queues.values()), "streams wait for each other"
                return
            first = self.queues[self._choose(ready)].popleft()
            if not isinstance(first, Event):
                first()
