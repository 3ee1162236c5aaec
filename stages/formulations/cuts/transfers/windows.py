"""Says what passes over the link between two cuts for certain, in units of memory; `model` has the symbols."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stowage.stages.formulations.cuts.transfers.model import TransferModel


@dataclass(frozen=True)
class Window:
    """The time from T_begin to T_end; if it wraps, T_end is one of the next step.

    T_(N+1) is the end of the step.
    """

    begin: int
    end: int
    wraps: bool = False

    def of_this_step(self, first: int, last: int) -> bool:
        """Return whether something whose first run is in one of these intervals runs in it, in the step of T_begin."""
        return first >= self.begin and (self.wraps or last < self.end)

    def of_the_next(self, last: int) -> bool:
        """Return whether something whose first run is in this interval at the latest runs in it, in the next step."""
        return self.wraps and last < self.end


def brought(m: TransferModel, window: Window) -> Iterator[Any]:
    """Yield what comes up: reloads that are issued in the window, and complete in it because something then reads x.

    Let T_e be the latest cut after which, and before the end of the window, a reader of x has its first run. Reloads
    before T_e have come by then, and if x is not there at T_e it comes after. No value of a step is on its way when the
    step ends. What an update alone reads comes up if it runs on the device, needed[p].
    """
    for x, size in m.sizes.items():
        spans = m.certain_reads.get(x, ())
        if x in m.lasting:
            this = max((first for first, last in spans if window.of_this_step(first, last)), default=-1)
            following = max((first for first, last in spans if window.of_the_next(last)), default=-1)
            if following >= 0:
                ups, latest = [*range(window.begin, len(m.cuts) + 1), *range(following)], following
            else:
                ups, latest = list(range(window.begin, this)), this
            if latest >= 0 and (x, latest) in m.there:
                yield size * (1 - m.there[x, latest])
            if x in m.needed_by_update:
                variable, (first, last) = m.needed_by_update[x]
                if window.of_this_step(first, last) or window.of_the_next(last):
                    yield size * variable
        else:
            ups = list(_returns(m, x, window))
        for i in ups:
            if (x, i) in m.up:
                yield size * m.up[x, i]


def _returns(m: TransferModel, value: int, window: Window) -> Iterator[int]:
    """Yield the intervals in which a value that is brought back has come by the end of the window."""
    spans = m.certain_reads.get(value, ())
    of_step = value not in m.step.waiting
    if of_step and (window.wraps or window.end == len(m.cuts) + 1):
        yield from range(window.begin, len(m.cuts) + 1)
    else:
        latest = max((first for first, last in spans if window.of_this_step(first, last)), default=-1)
        yield from range(window.begin, latest + 1)
    if window.wraps:
        yield from range(max((first for first, last in spans if window.of_the_next(last)), default=-1) + 1)


def sent(m: TransferModel, window: Window) -> Iterator[Any]:
    """Yield what goes down: parts of values, and what changes in the window and is not there at its end, gone[p, k]."""
    intervals = list(range(window.begin, len(m.cuts) + 1 if window.wraps else window.end))
    intervals += range(window.end) if window.wraps else ()
    counted = set(intervals)
    for (s, j), variable in m.sent.items():
        if j - 1 in counted:
            yield m.sizes[s] * (variable - m.sent.get((s, j - 1), 0))
    for p in m.down:
        spans = [m.domain.first[u] for u in m.certain_changers(p)]
        if any(window.of_this_step(first, last) or window.of_the_next(last) for first, last in spans):
            yield m.sizes[p] * m.gone(p, window.end)
