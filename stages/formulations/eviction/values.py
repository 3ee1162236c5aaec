"""Follows the values of a step while it runs: which are in memory, when each is needed next, how it is made again."""

from __future__ import annotations

import math
from bisect import bisect_left
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
        self._first_runs = 0
        self._changed: set[int] = set()
        self._passed: set[int] = set()
        count = len(step.nbytes)
        self.in_memory = [False] * count
        self.need = [self._never] * count
        self.used_bytes = 0
        self.position = 0
        self.resident = np.zeros(count, dtype=bool)
        self.needed_at: Numbers = np.full(count, when[self._never])
        self.cost_s: Numbers = np.full(count, math.inf)
        self._last_again = [-1] * count
        self._chains: dict[int, frozenset[int] | None] = {}
        self._gone: list[set[int]] = [set() for _ in range(count)]  # of each value, what was made of it and dropped

    def _ran(self, node: int) -> bool:
        return node < self._first_runs

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
        if node == self._first_runs:
            self._first_runs += 1
        new = [v for v in step.creates[node] if not self.in_memory[v]]
        for value in new:
            self.in_memory[value] = True
            self.resident[value] = True
            self.used_bytes += step.nbytes[value]
            for read in step.reads[node]:
                self._gone[read].discard(value)
            self._chains.pop(value, None)
        self._changed.update(new)
        self._chains_change(new)
        for value in (*new, *step.reads[node]):
            self._renew(value)

    def drop(self, value: int) -> None:
        """Note that a value is no longer in memory."""
        self.in_memory[value] = False
        self.resident[value] = False
        self.used_bytes -= self._step.nbytes[value]
        reads = self._step.reads[self._step.maker[value]]
        for read in reads:
            self._gone[read].add(value)
        self._chains_change([value])
        if self.need[value] < self._never:
            for read in reads:
                self._renew(read)

    def dies_in(self, value: int, node: int) -> bool:
        """Return whether a value that is in memory is read last by the first run of a node."""
        if self._ran(node) or not self.in_memory[value] or self._step.readers[value][-1] != node:
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
        readers = self._step.readers[value]
        place = bisect_left(readers, self._first_runs)
        found = readers[place] if place < len(readers) else self._never
        return min(found, min(map(self.need.__getitem__, self._gone[value]), default=found))

    def _chains_change(self, values: Iterable[int]) -> None:
        """Note that making again what depends on values takes more or less than before.

        Where this came by since the chains were counted, it need not go again: whatever was dropped or made since then
        has been gone through by itself.
        """
        stack = list(values)
        while stack:
            value = stack.pop()
            readers = self._step.readers[value]
            for reader in readers[: bisect_left(readers, self._first_runs)]:
                for made in self._step.creates[reader]:
                    if self.in_memory[made]:
                        self._changed.add(made)
                    elif made not in self._passed:
                        self._passed.add(made)
                        self._chains.pop(made, None)
                        stack.append(made)

    def count_again(self) -> None:
        """Count anew what it takes to make values again, where that has changed."""
        step = self._step
        for value in self._changed:
            if self.in_memory[value]:
                chain = self._chain(value)
                cost_s = math.inf if chain is None else math.fsum(step.time_s[n] for n in chain)
                self.cost_s[value] = cost_s
                self._last_again[value] = -1 if chain is None else min(step.last_again[n] for n in chain)
        self._changed.clear()
        self._passed.clear()

    def _chain(self, value: int) -> frozenset[int] | None:
        """Return the nodes that make a value again, with all that is gone of what this takes; None if it has to stay.

        What is found for values that are gone is kept until something on which it depends is dropped or made.
        """
        step, chains, stack = self._step, self._chains, [value]
        while True:
            node = step.maker[stack[-1]]
            gone = [v for v in step.reads[node] if not self.in_memory[v]]
            found: frozenset[int] | None = None
            if not step.once[node] and all(chains.get(v, ()) is not None for v in gone):
                unknown = [v for v in gone if v not in chains]
                if unknown:
                    stack += unknown
                    continue
                found = frozenset((node,)).union(*(chains[v] or () for v in gone))
                found = found if len(found) <= LONGEST else None
            if len(stack) == 1:
                return found
            chains[stack.pop()] = found
