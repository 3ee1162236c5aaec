"""Look at many calls in rounds: a machine's speed drifts within seconds, and one call's samples should not all see the
same moment."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from stowage.stages.ir.costs import Cost
from stowage.stages.ir.trace import Call

ROUNDS = 3
"""How often each call is looked at, at most."""

TOGETHER = 64
"""So many calls take turns: what is found out is saved now and then, and a call's looks are seconds apart."""


def in_rounds(
    calls: Sequence[Call], look: Callable[[Call], Cost], rounds: int, progress: Callable[[int, int], None]
) -> Iterator[list[Cost]]:
    """Costs of all calls, `TOGETHER` at a time.

    Args:
        calls: distinct ones.
        look: measures one.
        rounds: how often each is looked at.
        progress: called with the number of calls done and the total before each look.
    """
    for start in range(0, len(calls), TOGETHER):
        together = calls[start : start + TOGETHER]
        looks: list[list[Cost]] = [[] for _ in together]
        for turn, k in itertools.product(range(rounds), range(len(together))):
            progress(start + (turn * len(together) + k) // rounds, len(calls))
            looks[k].append(look(together[k]))
        yield [whole(found) for found in looks]


def whole(looks: Sequence[Cost]) -> Cost:
    """One cost: the mean of all samples, and the most workspace that a look saw."""
    samples = sum(c.samples for c in looks)
    if not samples:
        return looks[0]
    time_s = sum(c.samples * c.time_s for c in looks) / samples
    return replace(looks[0], time_s=time_s, workspace_bytes=max(c.workspace_bytes for c in looks), samples=samples)
