"""Hide copies behind computing: start reloads earlier and end offloads later wherever the budget leaves room.

Decisions come per step of the cycle; here they are refined row by row. What waits longest moves first, and the referee
judges every round.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from types import MappingProxyType

import numpy as np

from stowage.stages.ir.plan import PlanAction
from stowage.stages.simulate.plan import Outcome, Step

ROUNDS = 24
PATIENCE = 4
WORTHWHILE = 5e-4
"""Rounds end when that many have not made the iteration faster by this share."""

_BESIDE = ("offload", "reload", "update")

_MARGIN = 1.05
"""Moves reach a little further than the wait that they are to hide."""


@dataclass(frozen=True)
class _Wait:
    row: int
    storage: int
    stall_s: float
    copy_row: int
    action: PlanAction


@dataclass(frozen=True)
class _Task:
    """An update by the CPU.

    Attributes:
        row: where it starts now.
        before: rows that it must follow.
        wait: the row that waits for it, or `row`.
        release_s, deadline_s: when that is, and when its weight is waited for; the latter may be in the next iteration.
        time_s: that it takes.
    """

    row: int
    before: tuple[int, ...]
    wait: int
    release_s: float
    deadline_s: float
    time_s: float


def earliest_deadline_first(tasks: Sequence[_Task], period_s: float) -> list[_Task]:
    """The order in which one worker takes tasks that come again every period: of those released, the most urgent."""
    waiting = sorted(tasks, key=lambda t: t.release_s)
    late_s = 0.0
    order: list[_Task] = []
    for _ in range(2):  # what is left of an iteration is done in the next one
        order, ready, now, position = [], [], late_s, 0
        while len(order) < len(waiting):
            while position < len(waiting) and waiting[position].release_s <= now:
                heappush(ready, (waiting[position].deadline_s, position))
                position += 1
            if not ready:
                now = waiting[position].release_s
                continue
            task = waiting[heappop(ready)[1]]
            order.append(task)
            now += task.time_s
        late_s = max(0.0, now - period_s)
    return order


def shift(
    steps: Sequence[Step],
    outcome: Outcome,
    sizes: Sequence[int],
    budget_bytes: int,
    judge: Callable[[Sequence[Step]], Outcome | None],
    touched: Mapping[int, frozenset[int]] = MappingProxyType({}),
) -> tuple[list[Step], Outcome]:
    """The same computations and copies, waiting less.

    Args:
        steps, outcome: a plan within the budget, and what the referee says of it.
        sizes: bytes of each storage.
        budget_bytes: what no row may exceed.
        judge: the referee; None for a plan that it refuses.
        touched: storages that each update by the CPU uses, by its node.
    """
    best, judged = list(steps), outcome
    current, now = best, judged
    idle = 0
    for _ in range(ROUNDS):
        if idle == PATIENCE:
            break
        moved = _Round(current, now, sizes, budget_bytes, touched).run()
        if moved is None or moved == current:
            break
        found = judge(moved)
        if found is None or found.peak_bytes > budget_bytes:
            break
        current, now = moved, found
        idle += 1
        if found.time_s < judged.time_s:
            if found.time_s < judged.time_s * (1 - WORTHWHILE):
                idle = 0
            best, judged = moved, found
    return best, judged


class _Round:
    def __init__(
        self,
        steps: Sequence[Step],
        outcome: Outcome,
        sizes: Sequence[int],
        budget_bytes: int,
        touched: Mapping[int, frozenset[int]],
    ) -> None:
        self.steps = steps
        self.rows = rows = outcome.rows
        self.period_s = outcome.time_s
        self.touched = touched
        self.sizes = sizes
        self.room = np.array([budget_bytes - r.peak_bytes for r in rows], dtype=np.int64)
        self.starts = [r.start_s for r in rows if r.action not in _BESIDE]
        self.positions = [i for i, r in enumerate(rows) if r.action not in _BESIDE]
        self.of: dict[int, list[int]] = {}
        for i, step in enumerate(steps):
            if step.kind != "compute":
                self.of.setdefault(step.storage, []).append(i)
        self.keys: dict[int, float] = {}

    def run(self) -> list[Step] | None:
        """The rows in their new order, or None if nothing moves."""
        for wait in sorted(self._waits(), key=lambda w: -w.stall_s):
            if wait.action == "offload":
                self._later(wait)
            elif wait.action == "reload":
                self._earlier(wait)
            else:
                self._postpone(wait)
        self._order_updates()
        if not self.keys:
            return None
        order = sorted(range(len(self.steps)), key=lambda i: (self.keys.get(i, float(i)), i))
        return [self.steps[i] for i in order]

    def _waits(self) -> list[_Wait]:
        found: list[_Wait] = []
        under_way: dict[int, int] = {}
        for i, step in enumerate(self.steps):
            if step.kind in _BESIDE:
                under_way[step.storage] = i
            elif step.kind == "wait":
                stall = self.rows[i].end_s - self.rows[i].start_s
                copy = under_way.get(step.storage)
                if copy is None:  # it began in the iteration before
                    copies = [j for j in self.of[step.storage] if self.steps[j].kind in _BESIDE]
                    copy = copies[-1]
                if stall > 1e-9:
                    found.append(_Wait(i, step.storage, stall, copy, self.steps[copy].kind))
        return found

    def _order_updates(self) -> None:
        """Updates by the CPU in the order of their deadlines, as far as gradients are there; each starts as early as
        that order admits."""
        tasks = [self._task(i) for i, step in enumerate(self.steps) if step.kind == "update"]
        position = -1.0
        for number, task in enumerate(earliest_deadline_first(tasks, self.period_s)):
            floor = max((self._key(j) for j in task.before), default=-1.0)
            position = max(position, floor)
            ceiling = self._key(task.wait) if task.wait > task.row else float("inf")
            self.keys[task.row] = min(position, max(floor, ceiling - 1e-3)) + 1e-7 * (number + 1)

    def _key(self, row: int) -> float:
        return self.keys.get(row, float(row))

    def _task(self, row: int) -> _Task:
        step, start = self.steps[row], self.rows[row].start_s
        before = [j for s in self.touched[step.node] for j in self.of.get(s, ()) if j < row]
        waits = [j for j in self.of[step.storage] if self.steps[j].kind == "wait"]
        wait = min((j for j in waits if j > row), default=min(waits, default=row))
        deadline_s = self.rows[wait].start_s + (0.0 if wait > row else self.period_s)
        release_s = self.rows[max(before, default=0)].end_s
        return _Task(row, tuple(before), wait, release_s, deadline_s, self.rows[row].end_s - start)

    def _postpone(self, wait: _Wait) -> None:
        """Wait for an update by the CPU, and start the reload of what it made, when it is done; memory only falls."""
        reload = wait.row + 1
        if reload >= len(self.steps) or self.steps[reload].kind != "reload":
            return
        if self.steps[reload].storage != wait.storage:
            return
        ceiling = min((j for j in self.of[wait.storage] if j > reload), default=len(self.steps))
        position = bisect_left(self.starts, self.rows[wait.row].end_s)
        # Rows after the wait will start earlier by the time that it no longer takes.
        later = bisect_left(self.starts, self.rows[wait.row].end_s + wait.stall_s)
        target = min(ceiling, self.positions[max(position, later)] if later < len(self.positions) else len(self.steps))
        if target > reload + 1:
            self.keys[wait.row] = target - 0.7
            self.keys[reload] = target - 0.6

    def _row_at(self, time_s: float) -> int:
        """The last row of the compute stream that starts no later than a time."""
        return self.positions[max(0, bisect_right(self.starts, time_s) - 1)]

    def _earlier(self, wait: _Wait) -> None:
        """Start the reload early enough to hide the wait, as far as there is room."""
        start = self.rows[wait.copy_row].start_s
        floor = max((j for j in self.of[wait.storage] if j < wait.copy_row), default=-1) + 1
        target = max(floor, self._row_at(start - wait.stall_s * _MARGIN))
        size = self.sizes[wait.storage]
        tight = np.flatnonzero(self.room[target : wait.copy_row] < size)
        if len(tight):
            target += int(tight[-1]) + 1
        if target < wait.copy_row:
            self.room[target : wait.copy_row] -= size
            self.keys[wait.copy_row] = target - 0.5

    def _later(self, wait: _Wait) -> None:
        """End the offload, and free what it copied, later, as far as there is room."""
        free = wait.row + 1
        if free >= len(self.steps) or self.steps[free].kind != "free" or self.steps[free].storage != wait.storage:
            return
        ceiling = min((j for j in self.of[wait.storage] if j > free), default=len(self.steps))
        after = self.rows[wait.row].end_s + (_MARGIN - 1) * wait.stall_s
        position = bisect_left(self.starts, after + wait.stall_s)
        target = min(ceiling, self.positions[position] if position < len(self.positions) else len(self.steps))
        size = self.sizes[wait.storage]
        tight = np.flatnonzero(self.room[free:target] < size)
        if len(tight):
            target = free + int(tight[0])
        if target > free + 1:
            self.room[free:target] -= size
            self.keys[wait.row] = target - 0.4
            self.keys[free] = target - 0.3
