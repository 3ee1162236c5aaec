"""Times what one process does alone, or what all ranks of a group do at once.

Ranks begin when all are there, and what they take is what the last of them takes: a step ends when its last rank's
does, and ranks that have ended leave their part of a link to the others.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

Work = Callable[[], object]


def nothing() -> None:
    """Do nothing."""


class Stopwatch:
    """Times what this process does alone."""

    def seconds(self, work: Work, beside: Work = nothing) -> float:
        """Return what `work` takes; `beside` starts, before that, what runs meanwhile."""
        beside()
        start = time.perf_counter()
        work()
        return time.perf_counter() - start


class RanksStopwatch(Stopwatch):
    """Times what all ranks of a group do at once; all of them call it together, and get the same seconds.

    A rank whose work fails goes on taking part, as the others would wait for it; `check` raises the error.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        """Take a group, and a device whose tensors it exchanges."""
        self._group = group
        self._found = torch.zeros(1, dtype=torch.float64, device=device)
        self._failed: Exception | None = None

    def seconds(self, work: Work, beside: Work = nothing) -> float:
        """Return what `work` takes on the slowest rank; infinite where it has failed on one."""
        dist.barrier(self._group)
        own_s = math.inf
        try:
            own_s = super().seconds(work, beside)
        except Exception as error:
            self._failed = self._failed or error
        self._found.fill_(own_s)
        dist.all_reduce(self._found, dist.ReduceOp.MAX, group=self._group)
        return self._found.item()

    def check(self) -> None:
        """Raise what has failed on this rank."""
        if self._failed is not None:
            raise self._failed


ALONE = Stopwatch()
