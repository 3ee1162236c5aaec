"""Hides transfers behind computing: starts reloads earlier and ends offloads later wherever the budget leaves room.

Decisions come per step of the cycle; here they are refined row by row. The longest wait is served first, and the
referee judges every round.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from math import ceil
from types import MappingProxyType

import numpy as np

from stowage.stages.ir.actions import PlanAction
from stowage.stages.ir.step import Step
from stowage.stages.simulate.plan import Outcome
from stowage.stages.solve.offload.hiding.deadlines import UpdateTask, earliest_deadline_first
from stowage.stages.solve.offload.hiding.timeline import FreeRunning, PlanTimeline, Wait

FREE_RUNNING_ROUNDS = 6
"""Rounds that look at everything that would be late.

The rounds after them look at what computing waits for.
"""

ROUNDS = 24
IDLE_ROUNDS = 4
WORTHWHILE_SHARE = 5e-4
"""Share of the iteration's time; rounds end when `IDLE_ROUNDS` of them have not made it faster by so much."""


def shift(
    steps: Sequence[Step],
    outcome: Outcome,
    sizes: Sequence[int],
    budget_bytes: int,
    judge: Callable[[Sequence[Step]], Outcome | None],
    touched: Mapping[int, frozenset[int]] = MappingProxyType({}),
) -> tuple[list[Step], Outcome]:
    """Move rows of transfers so that computing waits less; what is computed and transferred stays the same.

    Args:
        steps: the rows of a plan within the budget.
        outcome: the referee's outcome of that plan.
        sizes: bytes of each storage.
        budget_bytes: bytes that no row may exceed.
        judge: the referee; returns None for a plan that it refuses.
        touched: storages that each update by the CPU uses, by its node.
    """
    best, judged = list(steps), outcome
    for timeline, rounds in ((FreeRunning, FREE_RUNNING_ROUNDS), (PlanTimeline, ROUNDS)):
        current, now, idle = best, judged, 0
        for _ in range(rounds):
            moved = _Round(current, now, sizes, budget_bytes, touched, timeline).run()
            if moved is None or moved == current or idle == IDLE_ROUNDS:
                break
            found = judge(moved)
            if found is None or found.peak_bytes > budget_bytes:
                break
            current, now = moved, found
            idle += 1
            if found.time_s < judged.time_s:
                if found.time_s < judged.time_s * (1 - WORTHWHILE_SHARE):
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
        timeline: type[PlanTimeline],
    ) -> None:
        self.steps = steps
        self.times = outcome.times
        self.touched = touched
        self.sizes = sizes
        self.room = np.array([budget_bytes - r.peak_bytes for r in outcome.untimed], dtype=np.int64)
        self.of: dict[int, list[int]] = {}
        for i, step in enumerate(steps):
            if step.kind != "compute":
                self.of.setdefault(step.storage, []).append(i)
        self.time = timeline(steps, outcome, self.of)
        self.keys: dict[int, float] = {}

    def run(self) -> list[Step] | None:
        """Return the rows in their new order, or None if nothing moves."""
        for wait in sorted(self.time.waits(), key=lambda w: -w.late_s):
            if wait.action == "offload":
                self._later(wait)
            elif wait.action == "reload":
                self._earlier(wait)
            elif wait.action == "update":
                self._postpone(wait)
        self._order_updates()
        if not self.keys:
            return None
        order = sorted(range(len(self.steps)), key=lambda i: (self.keys.get(i, float(i)), i))
        return [self.steps[i] for i in order]

    def _order_updates(self) -> None:
        """Put updates by the CPU in the order of their deadlines, as far as gradients are there.

        Each starts as early as that order admits.
        """
        tasks = [self._task(i) for i, step in enumerate(self.steps) if step.kind == "update"]
        position = -1.0
        for number, task in enumerate(earliest_deadline_first(tasks, self.time.period_s)):
            floor = max((self._key(j) for j in task.before), default=-1.0)
            position = max(position, floor)
            ceiling = self._key(task.wait) if task.wait > task.row else float("inf")
            self.keys[task.row] = min(position, max(floor, ceiling - 1e-3)) + 1e-7 * (number + 1)

    def _key(self, row: int) -> float:
        return self.keys.get(row, float(row))

    def _task(self, row: int) -> UpdateTask:
        step, (start_s, end_s) = self.steps[row], self.times[row]
        before = [j for s in self.touched[step.node] for j in self.of.get(s, ()) if j < row]
        waits = [j for j in self.of[step.storage] if self.steps[j].kind == "wait"]
        wait = min((j for j in waits if j > row), default=min(waits, default=row))
        deadline_s = self.time.at_s[wait] + (0.0 if wait > row else self.time.period_s)
        release_s = self.time.at_s[max(before, default=0)]
        return UpdateTask(row, tuple(before), wait, release_s, deadline_s, end_s - start_s)

    def _postpone(self, wait: Wait) -> None:
        """Wait for an update by the CPU only when it is done, and start the reload of its weight then, if one follows.

        Memory only falls.
        """
        last = wait.row + 1 if self._follows(wait, "reload") else wait.row
        ceiling = min((ceil(self._key(j)) for j in self.of[wait.storage] if j > last), default=len(self.steps))
        target = min(ceiling, self.time.row_after(wait.wanted_s))
        if target > last + 1:
            self.keys[wait.row] = target - 0.7
            if last > wait.row:
                self.keys[last] = target - 0.6

    def _follows(self, wait: Wait, kind: PlanAction) -> bool:
        """Return whether the row after a wait does so with the same storage."""
        row = wait.row + 1
        return row < len(self.steps) and self.steps[row].kind == kind and self.steps[row].storage == wait.storage

    def _earlier(self, wait: Wait) -> None:
        """Start the reload early enough to hide the wait, as far as there is room."""
        floor = max((int(self._key(j)) for j in self.of[wait.storage] if j < wait.copy_row), default=-1) + 1
        target = max(floor, self.time.row_at(wait.wanted_s))
        size = self.sizes[wait.storage]
        tight = np.flatnonzero(self.room[target : wait.copy_row] < size)
        if len(tight):
            target += int(tight[-1]) + 1
            self._overtake(wait.copy_row)
        if target < wait.copy_row:
            self.room[target : wait.copy_row] -= size
            self.keys[wait.copy_row] = target - 0.5

    def _overtake(self, reload: int) -> None:
        """Let reloads that are needed later, and keep this one waiting, start after it; memory only falls."""
        for number, other in enumerate(self.time.ahead_of(reload)):
            self.keys.setdefault(other, reload + 1e-4 * (number + 1))

    def _later(self, wait: Wait) -> None:
        """End the offload, and free what it copied, later, as far as there is room."""
        free = wait.row + 1
        if not self._follows(wait, "free"):
            self._later_for_updates(wait)
            return
        ceiling = min((j for j in self.of[wait.storage] if j > free), default=len(self.steps))
        target = min(ceiling, self.time.row_after(wait.wanted_s))
        size = self.sizes[wait.storage]
        tight = np.flatnonzero(self.room[free:target] < size)
        if len(tight):
            target = free + int(tight[0])
        if target > free + 1:
            self.room[free:target] -= size
            self.keys[wait.row] = target - 0.4
            self.keys[free] = target - 0.3

    @cached_property
    def _shared(self) -> set[int]:
        """Return the storages that several updates by the CPU use."""
        uses = Counter(s for step in self.steps if step.kind == "update" for s in self.touched[step.node])
        return {s for s, count in uses.items() if count > 1}

    def _later_for_updates(self, wait: Wait) -> None:
        """Postpone the wait for the copy of the clipping scale: several CPU updates read it, the device does not."""
        if wait.storage not in self._shared:
            return
        ceiling = min((j for j in self.of[wait.storage] if j > wait.row), default=len(self.steps))
        target = min(ceiling, self.time.row_after(wait.wanted_s))
        if target > wait.row + 1:
            self.keys[wait.row] = target - 0.4
