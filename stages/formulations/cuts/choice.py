"""Chooses cuts: nodes that nearly every other precedes or follows, where a schedule needs most memory."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from stowage.stages.formulations.cuts.step_graph import Bits, StepGraph

ON_SPINE = 0.9
"""Share of the core that a node of the spine precedes or follows."""

AT_ONCE = 256
"""Rows of bits that are unpacked at a time."""

FULL = 0.99
"""Share of the highest memory from which on a place counts as full."""


@dataclass(frozen=True)
class Choice:
    """Chooses cuts of one step.

    Attributes:
        step: the step.
        among: the nodes that may be cuts; by default all.
    """

    step: StepGraph
    among: Container[int] | None = None

    @cached_property
    def spine(self) -> list[int]:
        """Return the nodes of backward that nearly all of the core precede or follow, in their order.

        The core is the last node of the longest way through backward, with all that precede it: weights' gradients and
        updates, which nothing follows, do not count. A node that few precede, such as the gradient of a mean, cuts off
        too little.
        """
        ancestors = self.step.ancestors
        backward = [n.node for n in self.step.nodes if n.phase == "backward"]
        if not backward:
            return []
        last = max(backward, key=lambda n: (ancestors[n].bit_count(), -n))
        core = ancestors[last] | 1 << last
        inside = [n for n in range(len(ancestors)) if core >> n & 1]
        behind = _counts_behind([ancestors[n] for n in inside], len(ancestors))
        enough = ON_SPINE * len(inside)
        spine = [n for n in backward if core >> n & 1 and behind[n] + ancestors[n].bit_count() >= enough]
        return [n for n in spine if self.among is None or n in self.among]

    def end_of_forward(self) -> list[int]:
        """Return the first cut to try: the first node of the spine."""
        return self.spine[:1]

    def hottest(self, peaks: Mapping[int, int], count: int) -> list[int]:
        """Return nodes of the spine whose first runs need most memory, none of them close to another.

        Where memory is full again and again, the earliest such place is one of them: most is kept for backward there.

        Args:
            peaks: for each node the bytes that its first run needs in some schedule.
            count: how many at most.
        """
        if not peaks:
            return self.end_of_forward()
        full = FULL * max((peaks[n] for n in self.spine if n in peaks), default=0)
        found = [n for n in self.spine if peaks.get(n, 0) >= full][:1]
        apart = max(1, len(self.spine) // (8 * max(count, 1)))
        place = {node: k for k, node in enumerate(self.spine)}
        for node in sorted((n for n in self.spine if n in peaks), key=lambda n: (-peaks[n], n)):
            if len(found) == count:
                break
            if all(abs(place[node] - place[other]) >= apart for other in found):
                found.append(node)
        return found

    def beside(self, node: int) -> list[int]:
        """Return the neighbours of a node on the spine."""
        at = self.spine.index(node)
        return [self.spine[k] for k in (at - 1, at + 1) if 0 <= k < len(self.spine)]

    def more(self, cuts: Sequence[int], order: Sequence[int], level: Sequence[int], budget_bytes: int) -> list[int]:
        """Return cuts where a schedule exceeds the budget: one for each interval in which it does.

        Args:
            cuts: the cuts so far.
            order: the nodes of the schedule, in the order in which they run.
            level: bytes during each run.
            budget_bytes: the budget.
        """
        first = {node: position for position, node in reversed(list(enumerate(order)))}
        found: list[int] = []
        ends: list[int | None] = [None, *cuts, None]
        for before, after in pairwise(ends):
            begin = 0 if before is None else first[before] + 1
            end = len(order) if after is None else first[after]
            if begin >= end:
                continue
            hottest = max(range(begin, end), key=lambda p: level[p])
            if level[hottest] <= budget_bytes:
                continue
            between = list(self._between(before, after, order[begin:end]))
            if between:
                found.append(min(between, key=lambda n: _rank(level[first[n]], budget_bytes, first[n] - hottest)))
        return found

    def _between(self, before: int | None, after: int | None, nodes: Sequence[int]) -> Iterator[int]:
        precedes = self.step.precedes
        for node in dict.fromkeys(nodes):
            if self.among is not None and node not in self.among:
                continue
            if (before is None or precedes(before, node)) and (after is None or precedes(node, after)):
                yield node


def _rank(level: int, budget_bytes: int, distance: int) -> tuple[bool, int, int]:
    """Rank places for a cut: where the budget is exceeded, the more the better; otherwise close to where it is."""
    above = level > budget_bytes
    return not above, -level if above else 0, abs(distance)


def _counts_behind(ancestors: Sequence[Bits], count: int) -> list[int]:
    """Return how many of some nodes, given their ancestors, each of `count` nodes precedes."""
    found = np.zeros(count, dtype=np.int64)
    nbytes = -(-count // 8)
    for begin in range(0, len(ancestors), AT_ONCE):
        packed = b"".join(bits.to_bytes(nbytes, "little") for bits in ancestors[begin : begin + AT_ONCE])
        rows = np.frombuffer(packed, dtype=np.uint8).reshape(-1, nbytes)
        found += np.unpackbits(rows, axis=1, count=count, bitorder="little").sum(axis=0, dtype=np.int64)
    return [int(n) for n in found]
