"""Copies between the device and the tier below it, in time: one queue a direction, both sharing the link."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from stowage.stages.ir.machine import Link


@dataclass
class Copy:
    """One copy under way.

    Attributes:
        row: of the plan, which started it.
        left_bytes: still to move.
        start_s, end_s: NaN until known.
    """

    row: int
    left_bytes: float
    issued_s: float
    start_s: float = float("nan")
    end_s: float = float("nan")

    @property
    def finished(self) -> bool:
        """Nothing is left to move."""
        return self.end_s == self.end_s


class Copies:
    """A fluid model: the first copy of each queue moves at its rate; two that are too much for the link share it."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._queues: tuple[deque[Copy], deque[Copy]] = (deque(), deque())
        self._clock = 0.0

    def start(self, row: int, nbytes: int, now_s: float, *, down: bool) -> Copy:
        """Queue a copy at time `now_s`, which never goes back."""
        self.advance(now_s)
        copy = Copy(row, float(nbytes), now_s)
        self._queues[0 if down else 1].append(copy)
        return copy

    def advance(self, until_s: float) -> None:
        """Move bytes up to a time."""
        while self._clock < until_s:
            self._one_event(until_s)

    def finish(self, copy: Copy) -> float:
        """Move bytes until `copy` is done, and return when that is."""
        while not copy.finished:
            self._one_event(float("inf"))
        return copy.end_s

    def finish_all(self) -> float:
        """Move everything; when the last copy ends."""
        last = self._clock
        for queue in self._queues:
            for copy in list(queue):
                last = max(last, self.finish(copy))
        return last

    def _rates(self) -> tuple[float, float]:
        down = self._link.offload_bytes_per_s if self._queues[0] else 0.0
        up = self._link.reload_bytes_per_s if self._queues[1] else 0.0
        share = min(1.0, self._link.duplex_bytes_per_s / (down + up)) if down and up else 1.0
        return down * share, up * share

    def _one_event(self, until_s: float) -> None:
        """To the end of the next copy, or to `until_s` if that is earlier."""
        rates = self._rates()
        step = until_s - self._clock
        for queue, rate in zip(self._queues, rates):
            if queue:
                first = queue[0]
                if first.start_s != first.start_s:
                    first.start_s = self._clock
                step = min(step, first.left_bytes / rate)
        self._clock += step
        for queue, rate in zip(self._queues, rates):
            if queue:
                queue[0].left_bytes -= rate * step
                if queue[0].left_bytes <= 1e-3:  # a thousandth of a byte: rounding
                    queue.popleft().end_s = self._clock
