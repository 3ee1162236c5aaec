"""Follows the values of a step while it runs: which are in memory, when each is needed next, how it is made again."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from stowage.stages.formulations.eviction.step import EvictionStep

Numbers = np.ndarray[tuple[int], np.dtype[np.float64]]

SHORTEST = 1e-12
"""Distance to what is needed at once."""

LONGEST = 64
"""Nodes that making a value again may take: one that takes more stays."""


class Values:
    """Keeps account of the values while nodes run and values are dropped.

    A value that was dropped needs what its maker reads: it lends these its own next use.

    Attributes:
        in_memory: which values are in memory.
        need: the node before whose first run each value is needed next; beyond the last where it never is.
        used_bytes: bytes of what is in memory.
        position: the node that is to run for the first time.
    """

    def __init__(self, step: EvictionStep, when: Sequence[float]) -> None:
        """Begin with nothing in memory.

        Args:
            step: the step.
            when: the place in time of each node, of the end, and of never.
        """
        self._step = step
        self._nodes = len(step.reads)
        self._never = self._nodes + 1
        self._when = when
        self._ran = [False] * (self._nodes + 1)
        self._changed: set[int] = set()
        count = len(step.nbytes)
        self.in_memory = [False] * count
        self.need = [self._never] * count
        self.used_bytes = 0
        self.position = 0
        self.resident = np.zeros(count, dtype=bool)
        self.needed_at: Numbers = np.full(count, when[self._never])
        self.cost_s: Numbers = np.full(count, math.inf)
        self._last_again = [-1] * count

    def ran(self, node: int) -> bool:
        """Return whether a node has run."""
        return self._ran[node]

    def unneeded(self) -> list[int]:
        """Return what is in memory and will not be read any more, as far as is known."""
        return [v for v in np.flatnonzero(self.resident).tolist() if self.need[v] == self._never]

    def distances(self, values: Sequence[int] | np.ndarray[tuple[int], np.dtype[np.int64]]) -> Numbers:
        """Return the distances from now to the next use of values."""
        found: Numbers = np.maximum(self.needed_at[values] - self._when[self.position], SHORTEST)
        return found

    def may_go(self, value: int) -> bool:
        """Return whether a value can be made again when it is needed."""
        return self.need[value] == self._never or self.need[value] <= self._last_again[value]

    def made(self, node: int) -> None:
        """Note that a node has run, and that what it makes is in memory."""
        step = self._step
        self._ran[node] = True
        new = [v for v in step.creates[node] if not self.in_memory[v]]
        for value in new:
            self.in_memory[value] = True
            self.resident[value] = True
            self.used_bytes += step.nbytes[value]
        self._changed.update(new)
        self._chains_change(new)
        for value in (*new, *step.reads[node]):
            self._renew(value)

    def drop(self, value: int) -> None:
        """Note that a value is no longer in memory."""
        self.in_memory[value] = False
        self.resident[value] = False
        self.used_bytes -= self._step.nbytes[value]
        self._chains_change([value])
        if self.need[value] < self._never:
            for read in self._step.reads[self._step.maker[value]]:
                self._renew(read)

    def dies_in(self, value: int, node: int) -> bool:
        """Return whether a value that is in memory is read last by the first run of a node."""
        if self._ran[node] or not self.in_memory[value] or self._step.readers[value][-1] != node:
            return False
        gone = (v for r in self._step.readers[value][:-1] for v in self._step.creates[r] if not self.in_memory[v])
        return all(self.need[v] == self._never for v in gone)

    def _renew(self, value: int) -> None:
        """Find anew when a value is needed next, and what its maker reads if it is gone."""
        stack = [value]
        while stack:
            value = stack.pop()
            need = self._next_use(value)
            if need != self.need[value]:
                self.need[value] = need
                self.needed_at[value] = self._when[need]
                if not self.in_memory[value]:
                    stack += self._step.reads[self._step.maker[value]]

    def _next_use(self, value: int) -> int:
        found = self._never
        for reader in self._step.readers[value]:
            if not self._ran[reader]:
                return min(found, reader)
            for made in self._step.creates[reader]:
                if not self.in_memory[made] and self.need[made] < found:
                    found = self.need[made]
        return found

    def _chains_change(self, values: Iterable[int]) -> None:
        """Note that making again what depends on values takes more or less than before."""
        stack, seen = list(values), set[int]()
        while stack:
            for reader in self._step.readers[stack.pop()]:
                if not self._ran[reader]:
                    break
                for made in self._step.creates[reader] if reader < self._nodes else ():
                    if made not in seen:
                        seen.add(made)
                        if self.in_memory[made]:
                            self._changed.add(made)
                        else:
                            stack.append(made)

    def count_again(self) -> None:
        """Count anew what it takes to make values again, where that has changed."""
        for value in self._changed:
            if self.in_memory[value]:
                self.cost_s[value], self._last_again[value] = self._chain(value)
        self._changed.clear()

    def _chain(self, value: int) -> tuple[float, int]:
        """Return the seconds to make a value again, with everything gone that this takes, and until when it can be."""
        step = self._step
        cost_s, last = 0.0, self._never
        stack = [step.maker[value]]
        seen = set(stack)
        while stack:
            node = stack.pop()
            if step.once[node] or len(seen) > LONGEST:
                return math.inf, -1
            cost_s += step.time_s[node]
            last = min(last, step.last_again[node])
            for read in step.reads[node]:
                maker = step.maker[read]
                if not self.in_memory[read] and maker not in seen:
                    seen.add(maker)
                    stack.append(maker)
        return cost_s, last
