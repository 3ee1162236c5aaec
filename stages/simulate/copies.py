"""Simulates what runs beside computing: copies over links, updates by the CPU, whatever has a lane of its own.

It is a fluid model of the lanes in `ir/actions.py`. Each lane works on its first part at a rate; lanes that are too
much for a link share it. A copy from or to the disk behind the host passes through the host: its bytes take the disk's
lane and the link to the device at once, at the rate of the slower one; where the host's own copies want that link too,
each gets half of it, or what the other leaves. An update of what is on the disk reads it, computes, and writes it back;
there is one worker for updates.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TypeAlias

from stowage.stages.ir.actions import LANES, LaneName
from stowage.stages.ir.machine import Link

_NANOSECONDS = 1e9
_ROUNDING = 1e-3
"""Bytes, or nanoseconds, less than which nothing is left."""


@dataclass(eq=False)
class _Part:
    """A part of a copy or an update, which one lane does in one go.

    Attributes:
        left: bytes to transfer, or nanoseconds of the CPU.
        through: bytes from or to the disk that the device's link carries too.
        lane: the lane that it is queued on when its turn comes.
        then: the part that is queued when this one is done.
    """

    left: float
    lane: _Lane
    through: bool = False
    then: _Part | None = None
    start_s: float = float("nan")
    end_s: float = float("nan")


_Lane: TypeAlias = "deque[_Part]"


@dataclass(frozen=True, eq=False)
class Beside:
    """A copy or an update under way."""

    first: _Part
    last: _Part

    @property
    def start_s(self) -> float:
        """Return when it began; NaN until then."""
        return self.first.start_s

    @property
    def end_s(self) -> float:
        """Return when it was done; NaN until then."""
        return self.last.end_s

    @property
    def finished(self) -> bool:
        """Return whether nothing is left to do."""
        return self.end_s == self.end_s


class Copies:
    """The lanes of `LANES` but the device's own, with what is queued on them.

    Four belong to links and share their rates; the others work for as long as their work takes, apart from the rest.
    """

    def __init__(self, link: Link, disk: Link | None = None) -> None:
        """Take the link to the lower tier, and the one between the host and the disk behind it."""
        self._link = link
        self._disk = disk
        self._down: _Lane = deque()
        self._up: _Lane = deque()
        self._write: _Lane = deque()
        self._read: _Lane = deque()
        linked = {
            ("link", "down"): self._down,
            ("link", "up"): self._up,
            ("disk", "down"): self._write,
            ("disk", "up"): self._read,
        }
        self._apart: dict[LaneName, _Lane] = {n: deque() for n, lane in LANES.items() if lane.carrier == "apart"}
        self._of_link = {n: linked[lane.carrier, lane.direction] for n, lane in LANES.items() if lane.direction}
        self._lanes = (*linked.values(), *self._apart.values())
        self._apart_rates = (_NANOSECONDS,) * len(self._apart)
        self._latest_update: _Part | None = None
        self._going: list[tuple[_Lane, _Part, float]] | None = None
        """What the lanes work on and at which rates; None when something was queued or done since."""
        self._clock = 0.0

    def copy(self, lane: LaneName, nbytes: int, now_s: float, *, on_disk: bool = False) -> Beside:
        """Queue a copy at time `now_s`, which never decreases from call to call.

        Args:
            lane: a lane of the link between the device and the lower tier.
            nbytes: the bytes to transfer.
            now_s: when the copy may begin.
            on_disk: whether its other end is on the disk behind the host.
        """
        self.advance(now_s)
        through = on_disk and self._disk is not None
        queue = self._of_link[lane]
        if through:
            queue = self._write if queue is self._down else self._read
        part = _Part(float(nbytes), queue, through)
        self._queue(part)
        return Beside(part, part)

    def work(self, lane: LaneName, seconds: float, now_s: float) -> Beside:
        """Queue work that takes so long on a lane that shares no link."""
        self.advance(now_s)
        part = _Part(seconds * _NANOSECONDS, self._apart[lane])
        self._queue(part)
        return Beside(part, part)

    def update(self, lane: LaneName, seconds: float, now_s: float, *, disk_bytes: int = 0) -> Beside:
        """Queue an update by the CPU; `disk_bytes` of what it changes are read before it, and written after it."""
        self.advance(now_s)
        computing = first = last = _Part(seconds * _NANOSECONDS, self._apart[lane])
        if disk_bytes and self._disk is not None:
            first = _Part(float(disk_bytes), self._read, then=computing)
            last = computing.then = _Part(float(disk_bytes), self._write)
        before, self._latest_update = self._latest_update, last
        if before is None or before.end_s == before.end_s:
            self._queue(first)
        else:
            before.then = first
        return Beside(first, last)

    def _queue(self, part: _Part) -> None:
        part.lane.append(part)
        self._going = None

    def advance(self, until_s: float) -> None:
        """Advance to a time."""
        if self._clock < until_s and not any(self._lanes):
            self._clock += until_s - self._clock
        while self._clock < until_s:
            self._one_event(until_s)

    def finish(self, work: Beside) -> float:
        """Advance until `work` is done, and return when that is."""
        while not work.finished:
            self._one_event(float("inf"))
        return work.end_s

    def finish_all(self) -> None:
        """Advance until nothing is left."""
        while any(self._lanes):
            self._one_event(float("inf"))

    def _link_rates(self) -> tuple[float, float, float, float]:
        """Return the rates of the links' lanes in bytes per second, while all lanes go on."""
        link = self._link
        down = link.offload_bytes_per_s if self._down else 0.0
        up = link.reload_bytes_per_s if self._up else 0.0
        if not self._write and not self._read:
            share = _share(down + up if down and up else 0.0, link)
            return down * share, up * share, 0.0, 0.0
        assert self._disk is not None
        write = self._disk.offload_bytes_per_s if self._write else 0.0
        read = self._disk.reload_bytes_per_s if self._read else 0.0
        share = _share(write + read if write and read else 0.0, self._disk)
        write, read = write * share, read * share
        out = bool(self._write) and self._write[0].through
        back = bool(self._read) and self._read[0].through
        if out:
            write = min(write, link.offload_bytes_per_s / 2 if down else link.offload_bytes_per_s)
            down = down and down - write
        if back:
            read = min(read, link.reload_bytes_per_s / 2 if up else link.reload_bytes_per_s)
            up = up and up - read
        moving_down, moving_up = down + (write if out else 0.0), up + (read if back else 0.0)
        share = _share(moving_down + moving_up if moving_down and moving_up else 0.0, link)
        return down * share, up * share, write * (share if out else 1.0), read * (share if back else 1.0)

    def _rates(self) -> tuple[float, ...]:
        """Return the rates of all lanes, in bytes or nanoseconds per second."""
        linked, apart = self._link_rates(), self._apart_rates
        down, up, write, read = linked
        copying = down or up or write or read
        if not (self._link.carries_collectives and self._apart["collective"] and copying):
            return (*linked, *apart)
        halved = tuple(r / 2 if name == "collective" else r for name, r in zip(self._apart, apart, strict=True))
        return (*(r / 2 for r in linked), *halved)

    def _heads(self) -> list[tuple[_Lane, _Part, float]]:
        """Return what the lanes work on from now on, and at which rates."""
        going: list[tuple[_Lane, _Part, float]] = []
        for lane, rate in zip(self._lanes, self._rates()):
            if lane:
                first = lane[0]
                if first.start_s != first.start_s:
                    first.start_s = self._clock
                going.append((lane, first, rate))
        return going

    def _one_event(self, until_s: float) -> None:
        """Advance to the end of the next part, or to `until_s` if that is earlier."""
        if self._going is None:
            self._going = self._heads()
        going = self._going
        step = min([until_s - self._clock, *(first.left / rate for _, first, rate in going)])
        self._clock += step
        for lane, first, rate in going:
            first.left -= rate * step
            if first.left <= _ROUNDING:
                self._going = None
                lane.popleft()
                first.end_s = self._clock
                if first.then is not None:
                    self._queue(first.then)


def _share(both_bytes_per_s: float, link: Link) -> float:
    """Return the share of their rates that two directions get which want this much together."""
    return min(1.0, link.duplex_bytes_per_s / both_bytes_per_s) if both_bytes_per_s else 1.0
