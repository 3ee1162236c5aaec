"""Who touched which memory, and whether that was in an order: vector clocks, one for each lane."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

Clock = dict[str, int]
"""Lane -> how much of its work is certain to be done."""


def join(into: Clock, other: Clock) -> None:
    """Whatever `other` knows to be done, `into` knows too."""
    for lane, time in other.items():
        if into.get(lane, 0) < time:
            into[lane] = time


@dataclass(frozen=True)
class Access:
    """One lane reads or writes some memory.

    Attributes:
        lane: of the work.
        time: its place in the lane.
        label: what it is and where the step asks for it.
        kind: `reads`, `writes`, or what the allocator does: `takes`, `frees`.
    """

    lane: str
    time: int
    label: str
    kind: str

    def __str__(self) -> str:
        return f"{self.lane} {self.kind} it ({self.label})"


@dataclass(frozen=True)
class Race:
    """Two accesses of which one changes the memory, and nothing says which comes first.

    Attributes:
        memory: whose it is.
        first, second: in the order in which they happened to be done.
    """

    memory: str
    first: Access
    second: Access

    @property
    def lanes(self) -> frozenset[str]:
        """The two that nothing orders."""
        return frozenset((self.first.lane, self.second.lane))

    def __str__(self) -> str:
        return f"'{self.memory}': {self.first}, and {self.second}: nothing says which comes first"


@dataclass
class _Cell:
    """The last change of some memory, and who read it since."""

    write: Access | None = None
    reads: dict[str, Access] = field(default_factory=dict)


class Shadow:
    """Every access of every piece of memory.

    Attributes:
        races: pairs without an order, each pair of labels once.
    """

    def __init__(self) -> None:
        self.races: list[Race] = []
        self._cells: dict[Hashable, _Cell] = {}
        self._seen: set[tuple[str, str, str]] = set()

    def read(self, key: Hashable, memory: str, access: Access, clock: Clock) -> None:
        """It must come after the last change."""
        cell = self._cells.setdefault(key, _Cell())
        self._compare(memory, cell.write, access, clock)
        cell.reads[access.lane] = access

    def write(self, key: Hashable, memory: str, access: Access, clock: Clock) -> None:
        """It must come after the last change and after all who read that."""
        cell = self._cells.setdefault(key, _Cell())
        for other in (cell.write, *cell.reads.values()):
            self._compare(memory, other, access, clock)
        cell.write = access
        cell.reads.clear()

    def _compare(self, memory: str, earlier: Access | None, access: Access, clock: Clock) -> None:
        if earlier is None or earlier.lane == access.lane or clock.get(earlier.lane, 0) >= earlier.time:
            return
        known = (memory, earlier.label, access.label)
        if known not in self._seen:
            self._seen.add(known)
            self.races.append(Race(memory, earlier, access))
