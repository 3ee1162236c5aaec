"""Chooses runs of consecutive calls that are executed in order to time some of them.

A call takes as long as it does in a step where it finds caches, the allocator and the interpreter as the calls before
it left them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from stowage.stages.ir.trace import Call, TraceTables
from stowage.stages.ir.updates import CLIP, UPDATE, UPDATE_ALL

LEAD = 8
"""Calls that run untimed before the first timed one, at least."""

LEAD_BYTES = 16 << 20
"""Bytes that the untimed calls touch, at least.

Then the caches near the cores are those of the step; weights that all calls share and code are in them too.
"""

MOST_LEAD = 256
"""Untimed calls at most."""

BRIDGE = 32
"""Calls at most between two that are sought for which both share a window: a new window costs more."""

OCCURRENCES = 4
"""Occurrences of equal calls that are sought, spread over a step; others are timed where windows include them."""

WINDOW_BYTES = 128 << 20
"""Bytes that a window's calls read and write at most, unless one call alone needs more."""


@dataclass(frozen=True)
class Window:
    """Consecutive calls, of which the last ones are timed.

    Attributes:
        calls: the calls in the order of the step.
        lead: number of calls at the beginning that are not timed.
    """

    calls: tuple[Call, ...]
    lead: int

    @property
    def timed(self) -> tuple[Call, ...]:
        """Return the calls after the lead."""
        return self.calls[self.lead :]


def choose_windows(
    trace: TraceTables, wanted: Collection[str], *, window_bytes: int = WINDOW_BYTES, occurrences: int = OCCURRENCES
) -> list[Window]:
    """Choose windows in which every call whose signature is `wanted` is timed, a few times if a step has it often.

    Updates and clipping, which no operator does, are in none.
    """
    calls = [call for call in trace.calls if call.target not in (UPDATE, UPDATE_ALL, CLIP)]
    windows: list[Window] = []
    end = 0
    for first, last in _runs(_sought(calls, wanted, occurrences)):
        start = max(first, end)
        while start <= last:
            lead = _lead(trace, calls, start, window_bytes)
            end = _end(trace, calls, (lead, start, last + 1), window_bytes)
            windows.append(Window(tuple(calls[lead:end]), start - lead))
            start = end
    return windows


def _sought(calls: Sequence[Call], wanted: Collection[str], occurrences: int) -> list[int]:
    """Return positions in order: of each signature the middles of as many equal parts of its occurrences."""
    places: dict[str, list[int]] = {}
    for position, call in enumerate(calls):
        if call.signature in wanted:
            places.setdefault(call.signature, []).append(position)
    found: set[int] = set()
    for there in places.values():
        parts = min(occurrences, len(there))
        found.update(there[(2 * part + 1) * len(there) // (2 * parts)] for part in range(parts))
    return sorted(found)


def _runs(positions: Sequence[int]) -> list[tuple[int, int]]:
    """Return first and last of runs of positions with short bridges between them."""
    runs: list[tuple[int, int]] = []
    for position in positions:
        if runs and position - runs[-1][1] <= BRIDGE:
            runs[-1] = (runs[-1][0], position)
        else:
            runs.append((position, position))
    return runs


def _lead(trace: TraceTables, calls: Sequence[Call], start: int, window_bytes: int) -> int:
    """Return the start of a window whose timed calls begin at `start`: as early as is needed and fits."""
    touched = _touched(trace, calls[start])
    nbytes = _bytes(trace, touched)
    position = start
    while position > 0 and (start - position < LEAD or (nbytes < LEAD_BYTES and start - position < MOST_LEAD)):
        fresh = _touched(trace, calls[position - 1]) - touched
        nbytes += _bytes(trace, fresh)
        if nbytes > window_bytes // 2:
            break
        touched |= fresh
        position -= 1
    return position


def _end(trace: TraceTables, calls: Sequence[Call], span: tuple[int, int, int], window_bytes: int) -> int:
    """Return where a window ends: one call is timed at least."""
    lead, start, stop = span
    touched: set[int] = set()
    for position in range(lead, start + 1):
        touched |= _touched(trace, calls[position])
    nbytes = _bytes(trace, touched)
    for position in range(start + 1, stop):
        fresh = _touched(trace, calls[position]) - touched
        nbytes += _bytes(trace, fresh)
        if nbytes > window_bytes:
            return position
        touched |= fresh
    return stop


def _touched(trace: TraceTables, call: Call) -> set[int]:
    return {trace.values[v].storage for v in (*call.reads, *call.returns) if v >= 0}


def _bytes(trace: TraceTables, storages: Collection[int]) -> int:
    return sum(trace.storages[s].nbytes for s in storages)
