"""Updates by the CPU: one worker, and the order that meets most deadlines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush


@dataclass(frozen=True)
class Task:
    """Describes an update by the CPU for scheduling.

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


def earliest_deadline_first(tasks: Sequence[Task], period_s: float) -> list[Task]:
    """Return the order in which one worker takes tasks that come again every period: of those released, the most
    urgent."""
    waiting = sorted(tasks, key=lambda t: t.release_s)
    late_s = 0.0
    order: list[Task] = []
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
