"""Shares the time among the ways to compute a step: the least of their bounds counts, so that is what is improved."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from typing import Protocol

from stowage.stages.solve.cuts.way import CLOSE


class Bounded(Protocol):
    """One way to compute the step: its bound, and the fastest plan of it that is known."""

    bound_s: float
    fastest_s: float

    def improve(self, deadline_s: float) -> Generator[None]:
        """Improve the bound, solve by solve."""
        ...


def improve_all(mixed: Bounded | None, ways: Sequence[Bounded], deadline_s: float) -> None:
    """Improve the bounds of all ways, and find schedules.

    The program of all mixtures, if there is one, bounds every way, and is improved first. Otherwise the way with the
    least bound is always the next, until the fastest schedule that is known is about as fast as that bound, or nothing
    is left to try.

    Args:
        mixed: the program of all mixtures; None where nothing can be mixed.
        ways: the ways.
        deadline_s: what has been proven by then counts, on the clock of `time.monotonic`.
    """
    everything = [*([mixed] if mixed is not None else []), *ways]
    going = {k: way.improve(deadline_s) for k, way in enumerate(everything)}
    while going and time.monotonic() < deadline_s:
        fastest_s = min(way.fastest_s for way in everything)
        least_s = mixed.bound_s if mixed is not None else min(way.bound_s for way in ways)
        if fastest_s <= least_s * (1 + CLOSE):
            return
        k = min(going, key=lambda k: (everything[k] is not mixed, everything[k].bound_s, k))
        if everything[k].bound_s > fastest_s:
            del going[k]  # no schedule of it can win
            continue
        try:
            next(going[k])
        except StopIteration:
            del going[k]
