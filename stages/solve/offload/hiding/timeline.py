"""Says when the rows of a plan happen: as the referee has it, or as it would be if computing never waited."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from stowage.stages.ir.actions import ACTIONS, LaneName, PlanAction
from stowage.stages.ir.step import Step
from stowage.stages.simulate.plan import Outcome


@dataclass(frozen=True)
class Wait:
    """A row that waits for the transfer or update of its storage.

    Attributes:
        row, storage: the row and its storage.
        late_s: how long computing waits, or would wait.
        copy_row, action: the row that it waits for, and its action.
        wanted_s: when an offload or update is over; when a reload should start.
    """

    row: int
    storage: int
    late_s: float
    copy_row: int
    action: PlanAction
    wanted_s: float


class PlanTimeline:
    """The times of rows, and which of them wait.

    Attributes:
        at_s: start of each row.
        period_s: seconds of the iteration.
    """

    def __init__(self, steps: Sequence[Step], outcome: Outcome, of: dict[int, list[int]]) -> None:
        self._steps = steps
        self._times = outcome.times
        self._of = of
        self.at_s = [start_s for start_s, _ in outcome.times]
        self.period_s = outcome.time_s

    @cached_property
    def _positions(self) -> list[int]:
        return [i for i, s in enumerate(self._steps) if not ACTIONS[s.kind].beside]

    @cached_property
    def _starts(self) -> list[float]:
        return [self.at_s[i] for i in self._positions]

    def row_at(self, time_s: float) -> int:
        """Return the last row of the compute stream that starts no later than a time."""
        return self._positions[max(0, bisect_right(self._starts, time_s) - 1)]

    def row_after(self, time_s: float) -> int:
        """Return the first row of the compute stream that starts no earlier than a time, or the number of rows."""
        position = bisect_left(self._starts, time_s)
        return self._positions[position] if position < len(self._positions) else len(self._steps)

    def _pairs(self) -> list[tuple[int, int, bool]]:
        """Return (row of the wait, row of what it waits for, which began in the iteration before)."""
        found: list[tuple[int, int, bool]] = []
        under_way: dict[int, int] = {}
        for i, step in enumerate(self._steps):
            if ACTIONS[step.kind].beside:
                under_way[step.storage] = i
            elif ACTIONS[step.kind].ends:
                copy = under_way.get(step.storage)
                before = copy is None
                if copy is None:
                    copy = [j for j in self._of[step.storage] if ACTIONS[self._steps[j].kind].beside][-1]
                found.append((i, copy, before))
        return found

    @cached_property
    def _due_s(self) -> dict[int, float]:
        """Return for the row of each copy when it is waited for."""
        return {copy: self.at_s[row] + (self.period_s if before else 0.0) for row, copy, before in self._pairs()}

    @cached_property
    def _reloads(self) -> list[int]:
        return [i for i, s in enumerate(self._steps) if s.kind == "reload"]

    def ahead_of(self, reload: int) -> list[int]:
        """Return the rows of reloads that are before one in the queue of the link, and are waited for later."""
        before = self._steps[:reload]
        issued = next((i for i in range(reload - 1, -1, -1) if not ACTIONS[before[i].kind].beside), 0)
        issued_s = self._times[issued][0]
        found: list[int] = []
        for copy in reversed(self._reloads[: bisect_left(self._reloads, reload)]):
            if self._times[copy][1] <= issued_s:
                break
            if self._due_s.get(copy, 0.0) > self._due_s[reload]:
                found.append(copy)
        return found[::-1]

    def waits(self) -> list[Wait]:
        """Return where computing waits; what is wanted reaches a little further, for rows move."""
        found: list[Wait] = []
        for row, copy, _ in self._pairs():
            start, end = self._times[row]
            action, late = self._steps[copy].kind, end - start
            if late > 1e-9:
                # Rows after the wait will start earlier by the time that it no longer takes.
                early = ACTIONS[action].takes_device_memory
                wanted = self._times[copy][0] - late * WANTED_MARGIN if early else end + late * WANTED_MARGIN
                found.append(Wait(row, self._steps[row].storage, late, copy, action, wanted))
        return found


WANTED_MARGIN = 1.05


class FreeRunning(PlanTimeline):
    """Shows the rows as if computing never waited: whatever is late then, not only what computing waits for first."""

    def __init__(self, steps: Sequence[Step], outcome: Outcome, of: dict[int, list[int]]) -> None:
        super().__init__(steps, outcome, of)
        clock, self.at_s = 0.0, []
        for step, (start_s, end_s) in zip(steps, outcome.times):
            self.at_s.append(clock)
            if step.kind == "compute":
                clock += end_s - start_s
        self.period_s = clock
        self._time_s = {i: end - start for i, (start, end) in enumerate(outcome.times) if ACTIONS[steps[i].kind].beside}

    def _ends(self, action: PlanAction) -> dict[int, float]:
        """Return when each copy of one queue is over; what is left of an iteration goes on in the next."""
        rows = [i for i in self._time_s if self._steps[i].kind == action]
        free, found = 0.0, dict[int, float]()
        for _ in range(2):
            for i in rows:
                free = found[i] = max(free, self.at_s[i]) + self._time_s[i]
            free = max(0.0, free - self.period_s)
        return found

    def waits(self) -> list[Wait]:
        """Return what is late; reloads, which take memory of the device, from the last deadline backward."""
        found: list[Wait] = []
        ends: dict[int, float] = {}
        for action, kind in ACTIONS.items():
            if kind.beside and not kind.takes_device_memory:
                ends.update(self._ends(action))
        deadlines: dict[int, tuple[float, int]] = {}
        for row, copy, before in self._pairs():
            due = self.at_s[row] + (self.period_s if before else 0.0)
            action = self._steps[copy].kind
            if ACTIONS[action].takes_device_memory:
                deadlines[copy] = due, row
            elif ends[copy] > due + 1e-9:
                wanted = ends[copy] - (self.period_s if before else 0.0)
                found.append(Wait(row, self._steps[row].storage, ends[copy] - due, copy, action, wanted))
        latest: dict[LaneName, float] = {}
        for copy in sorted(deadlines, reverse=True):
            (due, row), action = deadlines[copy], self._steps[copy].kind
            lane = ACTIONS[action].lane
            starts = latest[lane] = min(due, latest.get(lane, float("inf"))) - self._time_s[copy]
            if starts < self.at_s[copy] - 1e-9:
                late = self.at_s[copy] - starts
                found.append(Wait(row, self._steps[row].storage, late, copy, action, starts))
        return found
