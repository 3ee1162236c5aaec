"""Keeps all plans that were proposed for one task: judged, with transfers hidden, and the fastest of them."""

from __future__ import annotations

import math

from stowage.stages.solve.proposal import JudgedPlan, Source, Task
from stowage.stages.solve.referee import Referee

SAME_SPEED = 1.001
"""Factor by which plans may differ and still count as equally fast."""


class JudgedPlans:
    """Keeps the plans that the referee accepted.

    Attributes:
        referee: judges them.
        judged: all of them, as they were proposed.
        fitting: those within the budget that may be chosen, with their transfers hidden.
    """

    def __init__(self, referee: Referee) -> None:
        self.referee = referee
        self.judged: list[JudgedPlan] = []
        self.fitting: list[JudgedPlan] = []

    def hear(self, source: Source, task: Task) -> None:
        """Take in everything that a source proposes."""
        judged = list(self.referee.listen(source.propose(task)))
        self.judged += judged
        # A plan that moves may be chosen while it is a little slower, one in memory only where it is the fastest.
        in_memory_s = min((p.time_s for p in self.fitting if p.tier is None), default=math.inf)
        moving_s = min((p.time_s for p in self.fitting if p.tier is not None), default=math.inf)
        found = [p for p in judged if not p.only_bound]
        self.fitting += self.referee.hide_all(found, min(in_memory_s, moving_s * SAME_SPEED))

    @property
    def fastest_s(self) -> float:
        """Return the least time of a plan within the budget."""
        return min((p.time_s for p in self.fitting), default=math.inf)

    def leanest(self) -> JudgedPlan:
        """Return the plan with the lowest peak, which tells the smallest budget that works.

        Plans in memory that may be chosen do not tell it: they take what the budget has room for.
        """
        return min((p for p in self.judged if p.only_bound or p.tier is not None), key=lambda p: p.peak_bytes)

    def fastest(self) -> JudgedPlan | None:
        """Return the fastest plan within the budget, or None where there is none.

        Plans that offload are compared with each other first: of those that are equally fast, the one that transfers
        least is taken, unless a baseline is faster. Then it must be faster than the best that stays on the device.
        """
        kept = [p for p in self.fitting if p.tier is None]
        moving = [p for p in self.fitting if p.tier is not None]
        best = min(kept, key=lambda p: (p.time_s, p.method != "keep_all", p.peak_bytes), default=None)
        if moving:
            limit_s = min(
                min(p.time_s for p in moving) * SAME_SPEED,
                min((p.time_s for p in moving if p.baseline), default=math.inf),
            )
            close = [p for p in moving if p.time_s <= limit_s]
            moved = min(close, key=lambda p: (p.moved_bytes, p.time_s, p.peak_bytes))
            if best is None or moved.time_s < best.time_s:
                return moved
        return best
