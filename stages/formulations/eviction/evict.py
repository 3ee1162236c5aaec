"""Runs a step within a budget by greedy eviction.

Nodes run for the first time in their order. Where memory would exceed the budget, the value with the lowest score is
dropped (see `rule`); where a node reads what was dropped, it is made again first, and so is what that takes.

Where somebody has decided what is in memory at some nodes, the rules fill in the rest: behind the first run of such a
node everything else is dropped, and before it what is needed there goes last.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from stowage.stages.formulations.eviction.rule import Rule
from stowage.stages.formulations.eviction.step import EvictionStep
from stowage.stages.formulations.eviction.values import SHORTEST, Values

MOST_RUNS = 3
"""Runs that a schedule may have, in numbers of nodes: with next to no room cheap nodes run again and again."""

NEVER = 2.0
"""Place in time of what is never needed, in steps."""


class Run(NamedTuple):
    """A run of a node.

    Attributes:
        node: the node.
        during: the node whose first run this is, or before whose first run it is; beyond the last at the end.
    """

    node: int
    during: int


Kept = Mapping[int, Collection[int]]
"""Node -> the values that are in memory when its first run has ended."""


def evict(
    step: EvictionStep, rule: Rule, budget_bytes: int, limit_s: float = math.inf, kept: Kept | None = None
) -> list[Run] | None:
    """Return the runs of a step within a budget, or None where the rule finds no room or the runs take too long.

    More than `MOST_RUNS` for each node are too long, too.

    Args:
        step: the step.
        rule: which values are dropped first.
        budget_bytes: for the values that the step makes and the workspaces, above what is there before it.
        limit_s: seconds that all runs together may take.
        kept: what is decided; values that cannot be made again stay all the same, and others go where there is no room.
    """
    try:
        return _Eviction(step, rule, budget_bytes, limit_s, kept or {}).runs
    except _NoScheduleError:
        return None


Mask = np.ndarray[tuple[int], np.dtype[np.bool_]]
"""A flag for each value."""


def _mask(values: Collection[int], count: int) -> Mask:
    found = np.zeros(count, dtype=np.bool_)
    found[list(values)] = True
    return found


class _NoScheduleError(Exception):
    """There is no room, or no time left."""


class _Eviction:
    def __init__(self, step: EvictionStep, rule: Rule, budget_bytes: int, limit_s: float, kept: Kept) -> None:
        self._step, self._rule = step, rule
        self._budget_bytes, self._left_s = budget_bytes, limit_s
        nodes = len(step.reads)
        durations = step.time_s if rule.in_seconds else [1.0] * nodes
        when = list(accumulate(durations, initial=0.0))
        self._values = Values(step, [*when, NEVER * when[-1] + SHORTEST])
        self._size_term = np.maximum(np.array(step.nbytes, dtype=np.float64), 1.0) ** rule.nbytes
        self._locks = [0] * len(step.nbytes)
        self.runs: list[Run] = []
        decided = {node: _mask(values, len(step.nbytes)) for node, values in sorted(kept.items())}
        ahead = list(decided.values())
        self._last = ahead.pop(0) if ahead else None
        for node in range(nodes):
            self._values.position = node
            self._ready(step.reads[node])
            self._run(node)
            self._budget_bytes += step.freed_bytes[node]
            if node in decided:
                self._drop_others(decided[node])
                self._last = ahead.pop(0) if ahead else None
        self._values.position = nodes
        self._ready(sorted(step.stays))

    def _ready(self, reads: tuple[int, ...] | list[int]) -> None:
        """Make again what is gone of values that are about to be read."""
        values, maker = self._values, self._step.maker
        if all(values.in_memory[v] for v in reads):
            return
        self._lock(reads, 1)
        for value in sorted(reads, key=lambda v: maker[v]):
            if not values.in_memory[value]:
                self._make_again(maker[value])
        self._lock(reads, -1)

    def _make_again(self, node: int) -> None:
        step, in_memory = self._step, self._values.in_memory
        stack = [node]
        self._lock(step.reads[node], 1)
        while stack:
            node = stack[-1]
            missing = [step.maker[v] for v in step.reads[node] if not in_memory[v]]
            if missing:
                stack.append(min(missing))
                self._lock(step.reads[stack[-1]], 1)
            else:
                self._run(stack.pop())
                self._lock(step.reads[node], -1)

    def _lock(self, values: tuple[int, ...] | list[int], count: int) -> None:
        for value in values:
            self._locks[value] += count

    def _run(self, node: int) -> None:
        """Run a node whose reads are in memory."""
        step, values = self._step, self._values
        self._left_s -= step.time_s[node]
        if self._left_s < 0 or len(self.runs) >= MOST_RUNS * len(step.reads):
            raise _NoScheduleError
        new_bytes = sum(step.nbytes[v] for v in step.creates[node] if not values.in_memory[v])
        taken_bytes = next((step.nbytes[v] for v in step.takes[node] if values.dies_in(v, node)), 0)
        touched = (*step.reads[node], *step.creates[node])
        self._lock(touched, 1)
        self._make_room(new_bytes + step.workspace_bytes[node] - taken_bytes)
        self._lock(touched, -1)
        self.runs.append(Run(node, values.position))
        values.made(node)

    def _make_room(self, nbytes: int) -> None:
        """Drop values until there is room for so many bytes."""
        values = self._values
        if values.used_bytes + nbytes <= self._budget_bytes:
            return
        for value in values.unneeded():
            if not self._locks[value]:
                values.drop(value)
        while values.used_bytes + nbytes > self._budget_bytes:
            values.count_again()
            values.drop(self._worst())

    def _drop_others(self, kept: Mask) -> None:
        """Drop what is not decided to stay, if it can be made again."""
        values = self._values
        values.count_again()
        for value in np.flatnonzero(values.resident & ~kept).tolist():
            if values.may_go(value) and math.isfinite(values.cost_s[value]):
                values.drop(value)
                values.count_again()

    def _worst(self) -> int:
        """Return the value that is dropped next."""
        values = self._values
        there = np.flatnonzero(values.resident)
        scores = values.cost_s[there] / (self._size_term[there] * values.distances(there) ** self._rule.distance)
        order = np.argsort(scores, kind="stable")
        if self._last is not None:
            order = order[np.argsort(self._last[there[order]], kind="stable")]
        for place in order.tolist():
            value = int(there[place])
            if math.isinf(scores[place]):
                continue
            if not self._locks[value] and values.may_go(value):
                return value
        raise _NoScheduleError
