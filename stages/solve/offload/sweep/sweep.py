"""Offload by a sweep over the executions of one iteration: whatever is needed last leaves first.

For any order of executions, with no blocks: so also for programs whose updates wait for the last gradient, where
gradients leave and come back. After Belady, A study of replacement algorithms for a virtual-storage computer (1966),
with a price for copies that are not below yet.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from itertools import pairwise

import numpy as np

from stowage.stages.ir.errors import IllegalPlanError
from stowage.stages.solve.offload.offloader import Offloader, OffloadPlan
from stowage.stages.solve.offload.sweep.late_updates import LateUpdate
from stowage.stages.solve.offload.sweep.rows import Gap, SweepRows
from stowage.stages.solve.program.chain import Execution

METHOD = "sweep"
SPARED = (0.0, 1.0, 2.0, 4.0, 8.0)
"""Room left for copies that start early or end late, in sizes of the largest tensor that moves."""

_Bytes = np.ndarray[tuple[int], np.dtype[np.int64]]


def sweeps(
    offloader: Offloader,
    executions: Sequence[Execution],
    budget_bytes: int,
    away: frozenset[int] = frozenset(),
    updates: Sequence[LateUpdate] = (),
) -> Iterator[OffloadPlan]:
    """Plans for given executions, copies not hidden yet; where none fits, the one that needs least.

    Args:
        offloader: of the program.
        executions: what is computed, in order.
        budget_bytes: of the device.
        away: what is to be below between iterations in any case.
        updates: those that the CPU does, of some of the executions, in its order; weight and states are below for them.
    """
    sweep = _Sweep(offloader, executions, away, updates)
    if sweep.least_bytes > budget_bytes:
        yield from sweep.plan(sweep.gaps)
        return
    largest = max((offloader.program.nbytes[g.storage] for g in sweep.gaps), default=0)
    seen: list[list[Gap]] = []
    for spared in SPARED:
        limit = max(budget_bytes - int(spared * largest), sweep.least_bytes)
        chosen = sweep.choose(limit)
        if chosen not in seen:
            seen.append(chosen)
            yield from sweep.plan(chosen)


def least_bytes(offloader: Offloader, executions: Sequence[Execution]) -> int:
    """The peak of given executions where everything leaves that can, and the device updates."""
    return _Sweep(offloader, executions, frozenset()).least_bytes


class _Sweep:
    """Which storages are below, and when.

    Attributes:
        gaps: all that there are.
        least_bytes: the peak where everything leaves that can.
    """

    def __init__(
        self,
        offloader: Offloader,
        executions: Sequence[Execution],
        away: frozenset[int],
        updates: Sequence[LateUpdate] = (),
    ) -> None:
        self._offloader = offloader
        self._program = program = offloader.program
        by_cpu = {u.node.node for u in updates}
        executions = [e for e in executions if e.node not in by_cpu]
        away = away.union(*(offloader.movable.intersection(u.node.mutates) for u in updates))
        self._executions = executions
        self._size = program.nbytes
        self._count = len(executions)
        resident = sum(s.nbytes for s in program.storages if s.role != "temporary")
        self._level: _Bytes = program.profile(executions) + resident
        self._clock = np.concatenate([[0.0], np.cumsum([program.nodes[e.node].time_s for e in executions])])
        self._changed = [frozenset((*n.mutates, *n.creates)) for n in program.nodes]
        # What is there in every iteration, gradients that wait included.
        self._persistent = offloader.movable | (offloader.gradients.keys() - program.temporary)
        self._rows = SweepRows(program, executions, updates, self._persistent)
        # What goes down for an update by the CPU does not come back.
        down = {s: self._rows.complete[s] for u in updates for s in u.down}
        gaps = (*self._persistent_gaps(), *self._temporary_gaps())
        self.gaps = [g for g in gaps if g.after < down.get(g.storage, self._count)]
        self._away = {
            n for n, g in enumerate(self.gaps) if g.storage in away and (g.before >= self._count or g.after < 0)
        }
        self._lost = self._take_memory({g.storage for g in self.gaps})
        self._level += offloader.below.staging_for(len({g.storage for g in self.gaps}))
        relieved = self._level.copy()
        for gap in self.gaps:
            self._shift(relieved, gap, -1)
        self.least_bytes = int(relieved.max(initial=0))

    def _persistent_gaps(self) -> Iterator[Gap]:
        """Of what is there when the iteration starts."""
        uses: dict[int, list[int]] = {s: [] for s in self._persistent}
        for position, execution in enumerate(self._executions):
            node = self._program.nodes[execution.node]
            for storage in self._persistent.intersection((*node.reads, *node.mutates)):
                uses[storage].append(position)
        for storage, own in sorted(uses.items()):
            if not own:
                yield Gap(storage, -1, self._count, fresh=False)
                continue
            if storage in self._program.consumed:  # it is used up; the iteration before left it where it is
                yield Gap(storage, -1, own[0], fresh=False)
            around = own if storage in self._program.consumed else [*own, own[0] + self._count]
            for a, b in pairwise(around):
                yield Gap(storage, a, b, fresh=storage in self._changed[self._executions[a].node])

    def _temporary_gaps(self) -> Iterator[Gap]:
        """Of copies that are made once in the iteration and read later."""
        smallest = self._offloader.below.smallest_bytes
        program = self._program
        last = program.last_uses(self._executions)
        copies: dict[int, list[int]] = defaultdict(list)
        for storage, made in last:
            copies[storage].append(made)
        wanted = {
            s
            for s, made in copies.items()
            if len(made) == 1
            and made[0] >= 0
            and self._size[s] >= smallest
            and (s not in program.keep or s in self._offloader.gradients)
        }
        if not self._offloader.below.activations:
            taken = {s for n in program.nodes if n.phase == "update" for s in n.reads}
            wanted &= taken
        uses: dict[int, list[int]] = defaultdict(list)
        for position, execution in enumerate(self._executions):
            node = program.nodes[execution.node]
            for storage in wanted.intersection((*node.reads, *node.mutates, *node.creates)):
                uses[storage].append(position)
        for storage, own in sorted(uses.items()):
            for a, b in pairwise(own):
                yield Gap(storage, a, b, fresh=storage in self._changed[self._executions[a].node])
            if storage in program.keep:
                yield Gap(storage, own[-1], self._count, fresh=True, returns=False)

    def _ranges(self, gap: Gap) -> list[tuple[int, int]]:
        """Positions at which its storage is below."""
        if gap.before <= self._count:
            return [(gap.after + 1, gap.before)]
        return [(gap.after + 1, self._count), (0, gap.before - self._count)]

    def _take_memory(self, movable: set[int]) -> dict[int, int]:
        """Count what sums take from summands; returns the sums that no longer can if their summand moves."""
        lost: dict[int, int] = {}
        last = self._program.last_uses(self._executions)
        for position, dying in self._program.sums(self._executions, last).items():
            self._level[position] -= self._size[dying[0]]
            if movable.issuperset(dying):
                lost.update(dict.fromkeys(dying, position))
        return lost

    def _shift(self, level: _Bytes, gap: Gap, sign: int) -> None:
        for start, end in self._ranges(gap):
            level[start:end] += sign * self._size[gap.storage]
        if gap.storage in self._lost:
            level[self._lost[gap.storage]] -= sign * self._size[gap.storage]

    def _at_s(self, position: int) -> float:
        return float(self._clock[position % self._count] + self._clock[-1] * (position // self._count))

    def _copy_s(self, gap: Gap, copied: set[int]) -> float:
        """What it costs to leave."""
        link, size = self._offloader.below.link, self._size[gap.storage]
        down_s = size / link.offload_bytes_per_s if gap.fresh or gap.storage not in copied else 0.0
        return down_s + (size / link.reload_bytes_per_s if gap.returns else 0.0)

    def choose(self, limit_bytes: int) -> list[Gap]:
        """Gaps that keep every execution below a limit, in the order of `gaps`."""
        level = self._level.copy()
        starting: dict[int, list[int]] = defaultdict(list)
        for number, gap in enumerate(self.gaps):
            for start, end in self._ranges(gap):
                if start < end:
                    starting[start].append(number)
        # What changes within the iteration has left before, where it is short of memory.
        copied = {g.storage for g in self.gaps if g.before >= self._count}
        for number in self._away:
            self._shift(level, self.gaps[number], -1)
        open_gaps: dict[bool, list[tuple[float, int]]] = {True: [], False: []}
        chosen: set[int] = set(self._away)
        for position in range(self._count):
            for number in starting.get(position, ()):
                gap = self.gaps[number]
                # The next use, on this round's clock: where a gap goes on from the iteration before, it is near.
                due = gap.before - self._count if position < gap.after + 1 else gap.before
                heappush(open_gaps[gap.fresh or gap.storage not in copied], (-self._at_s(due), number))
            while level[position] > limit_bytes:
                furthest = self._furthest(position, open_gaps, chosen, copied)
                if furthest is None:
                    break
                chosen.add(furthest)
                copied.add(self.gaps[furthest].storage)
                self._shift(level, self.gaps[furthest], -1)
        return [self.gaps[n] for n in sorted(self._needed(chosen, level, limit_bytes))]

    def _furthest(
        self, position: int, open_gaps: dict[bool, list[tuple[float, int]]], chosen: set[int], copied: set[int]
    ) -> int | None:
        """Of the gaps around a position the one that lasts longest for what it costs."""
        best: tuple[float, int] | None = None
        for waiting in open_gaps.values():
            while waiting and (waiting[0][1] in chosen or -waiting[0][0] <= self._at_s(position)):
                heappop(waiting)
            if waiting:
                due_s, number = -waiting[0][0], waiting[0][1]
                gap = self.gaps[number]
                worth = self._size[gap.storage] * (due_s - self._at_s(position)) / max(self._copy_s(gap, copied), 1e-12)
                best = max(best, (worth, number)) if best is not None else (worth, number)
        return best[1] if best is not None else None

    def _needed(self, chosen: set[int], level: _Bytes, limit_bytes: int) -> set[int]:
        """Without gaps that later choices made needless; dear and short ones first."""
        left = set(chosen)
        for number in sorted(chosen - self._away, key=lambda n: (self.gaps[n].before - self.gaps[n].after, n)):
            gap = self.gaps[number]
            self._shift(level, gap, 1)
            if all(level[a:b].max(initial=0) <= limit_bytes for a, b in self._ranges(gap)):
                left.discard(number)
            else:
                self._shift(level, gap, -1)
        return left

    def plan(self, chosen: Sequence[Gap]) -> Iterator[OffloadPlan]:
        """The plan, if the referee accepts it."""
        steps, state = self._rows.plan(chosen)
        try:
            yield self._offloader.judged(METHOD, steps, state)
        except IllegalPlanError:
            return
