"""Orders updates by the CPU, which has one worker, so that most deadlines are met."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush


@dataclass(frozen=True)
class UpdateTask:
    """An update by the CPU that is to be scheduled.

    Attributes:
        row: the row at which it starts now.
        before: rows that it must follow.
        wait: the row that waits for it, or `row`.
        release_s: the time of the last row that it must follow.
        deadline_s: the time at which its weight is waited for, possibly in the next iteration.
        time_s: the time that it takes.
    """

    row: int
    before: tuple[int, ...]
    wait: int
    release_s: float
    deadline_s: float
    time_s: float


def earliest_deadline_first(tasks: Sequence[UpdateTask], period_s: float) -> list[UpdateTask]:
    """Return the order in which one worker takes tasks that come again every period.

    Of the tasks that are released, it takes the one with the earliest deadline.
    """
    waiting = sorted(tasks, key=lambda t: t.release_s)
    late_s = 0.0
    order: list[UpdateTask] = []
    for _ in range(2):  # what is left of an iteration is done in the next one
        ready: list[tuple[float, int]] = []
        order, now, position = [], late_s, 0
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
