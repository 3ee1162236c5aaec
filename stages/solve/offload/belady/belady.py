"""Offloads along the executions of one iteration by Belady's rule: what is needed last is offloaded first.

It takes any order of executions, with no blocks: so also programs whose updates wait for the last gradient, where
gradients are offloaded and reloaded. After Belady, A study of replacement algorithms for a virtual-storage computer
(1966), with a price for copies that are not in the lower tier yet.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Iterator, Sequence
from heapq import heappop, heappush
from itertools import pairwise

import numpy as np

from stowage.stages.solve.offload.belady.late_updates import LateUpdate
from stowage.stages.solve.offload.belady.rows import Absence, BeladyRows
from stowage.stages.solve.offload.offloader import Offloader
from stowage.stages.solve.program.chain import Execution
from stowage.stages.solve.proposal import Decision, JudgedPlan, Proposal

METHOD = "belady"
SPARED_SIZES = (0.0, 1.0, 2.0, 4.0, 8.0)
"""Room left for transfers that start early or end late, in sizes of the largest tensor that is transferred."""

_Bytes = np.ndarray[tuple[int], np.dtype[np.int64]]


def belady_plans(
    offloader: Offloader,
    executions: Sequence[Execution],
    budget_bytes: int,
    offloaded_at_rest: frozenset[int] = frozenset(),
    updates: Sequence[LateUpdate] = (),
) -> Generator[Proposal, JudgedPlan | None, int]:
    """Propose plans for given executions, and the one that needs least where none fits.

    Args:
        offloader: the program, with the lower tier.
        executions: what is computed, in order.
        budget_bytes: bytes of the device.
        offloaded_at_rest: storages to be offloaded between iterations in any case.
        updates: updates by the CPU, out of the executions, in its order; weights and states are offloaded for them.

    Returns:
        The number of plans that were accepted.
    """
    planner = BeladyPlanner(offloader, executions, offloaded_at_rest, updates)
    if planner.least_bytes > budget_bytes:
        return (yield from _heard(planner.proposal(planner.absences)))
    largest = max((offloader.program.nbytes[g.storage] for g in planner.absences), default=0)
    seen: list[list[Absence]] = []
    accepted = 0
    for spared in SPARED_SIZES:
        limit = max(budget_bytes - int(spared * largest), planner.least_bytes)
        chosen = planner.choose(limit)
        if chosen not in seen:
            seen.append(chosen)
            accepted += yield from _heard(planner.proposal(chosen))
    return accepted


def _heard(proposal: Proposal) -> Generator[Proposal, JudgedPlan | None, int]:
    """Propose a plan, and return 1 where the referee accepts it."""
    verdict = yield proposal
    return int(verdict is not None)


def least_bytes(offloader: Offloader, executions: Sequence[Execution]) -> int:
    """Return the peak of given executions where everything is offloaded that can be, and the device updates."""
    return BeladyPlanner(offloader, executions, frozenset()).least_bytes


class BeladyPlanner:
    """Decides which storages are offloaded, and when.

    Attributes:
        absences: all stretches for which a storage may be offloaded.
        least_bytes: the peak where everything is offloaded that can be.
    """

    def __init__(
        self,
        offloader: Offloader,
        executions: Sequence[Execution],
        offloaded_at_rest: frozenset[int],
        updates: Sequence[LateUpdate] = (),
    ) -> None:
        self._offloader = offloader
        self._program = program = offloader.program
        by_cpu = {u.node.node for u in updates}
        executions = [e for e in executions if e.node not in by_cpu]
        offloaded_at_rest = offloaded_at_rest.union(*(offloader.movable.intersection(u.node.mutates) for u in updates))
        self._executions = executions
        self._size = program.nbytes
        self._count = len(executions)
        self._level: _Bytes = program.profile(executions) + program.base_bytes
        self._clock = np.concatenate([[0.0], np.cumsum([program.nodes[e.node].time_s for e in executions])])
        self._changed = [frozenset((*n.mutates, *n.creates)) for n in program.nodes]
        # Bytes that are there in every iteration, gradients that wait included.
        self._persistent = offloader.movable | (offloader.gradients.keys() - program.temporary)
        self._rows = BeladyRows(program, executions, updates, self._persistent)
        # Nothing that is offloaded for an update by the CPU is reloaded.
        down = {s: self._rows.complete[s] for u in updates for s in u.down}
        gaps = (*self._persistent_absences(), *self._temporary_absences())
        self.absences = [g for g in gaps if g.after < down.get(g.storage, self._count)]
        self._offloaded = {
            n
            for n, g in enumerate(self.absences)
            if g.storage in offloaded_at_rest and (g.before >= self._count or g.after < 0)
        }
        self._lost = self._take_memory({g.storage for g in self.absences})
        self._level += offloader.lower_tier.staging_for(len({g.storage for g in self.absences}))
        relieved = self._level.copy()
        for absence in self.absences:
            self._shift(relieved, absence, -1)
        self.least_bytes = int(relieved.max(initial=0))

    def _persistent_absences(self) -> Iterator[Absence]:
        """Yield absences of parameters, states and gradients that exist before the iteration."""
        uses: dict[int, list[int]] = {s: [] for s in self._persistent}
        for position, execution in enumerate(self._executions):
            node = self._program.nodes[execution.node]
            for storage in self._persistent.intersection((*node.reads, *node.mutates)):
                uses[storage].append(position)
        for storage, own in sorted(uses.items()):
            if not own:
                yield Absence(storage, -1, self._count, fresh=False)
                continue
            if storage in self._program.consumed:  # it is used up; the iteration before left it where it is
                yield Absence(storage, -1, own[0], fresh=False)
            around = own if storage in self._program.consumed else [*own, own[0] + self._count]
            for a, b in pairwise(around):
                yield Absence(storage, a, b, fresh=storage in self._changed[self._executions[a].node])

    def _temporary_absences(self) -> Iterator[Absence]:
        """Yield absences of what is made once in the iteration and read later."""
        smallest = self._offloader.lower_tier.smallest_bytes
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
        if not self._offloader.lower_tier.activations:
            taken = {s for n in program.nodes if n.phase == "update" for s in n.reads}
            wanted &= taken
        uses: dict[int, list[int]] = defaultdict(list)
        for position, execution in enumerate(self._executions):
            node = program.nodes[execution.node]
            for storage in wanted.intersection((*node.reads, *node.mutates, *node.creates)):
                uses[storage].append(position)
        for storage, own in sorted(uses.items()):
            for a, b in pairwise(own):
                yield Absence(storage, a, b, fresh=storage in self._changed[self._executions[a].node])
            if storage in program.keep:
                yield Absence(storage, own[-1], self._count, fresh=True, returns=False)

    def _ranges(self, absence: Absence) -> list[tuple[int, int]]:
        """Return the positions at which its storage is offloaded."""
        if absence.before <= self._count:
            return [(absence.after + 1, absence.before)]
        return [(absence.after + 1, self._count), (0, absence.before - self._count)]

    def _take_memory(self, movable: set[int]) -> dict[int, int]:
        """Count what sums take from summands; return the sums that no longer can if their summand is offloaded."""
        lost: dict[int, int] = {}
        last = self._program.last_uses(self._executions)
        for position, dying in self._program.sums(self._executions, last).items():
            self._level[position] -= self._size[dying[0]]
            if movable.issuperset(dying):
                lost.update(dict.fromkeys(dying, position))
        return lost

    def _shift(self, level: _Bytes, absence: Absence, sign: int) -> None:
        for start, end in self._ranges(absence):
            level[start:end] += sign * self._size[absence.storage]
        if absence.storage in self._lost:
            level[self._lost[absence.storage]] -= sign * self._size[absence.storage]

    def _at_s(self, position: int) -> float:
        return float(self._clock[position % self._count] + self._clock[-1] * (position // self._count))

    def _copy_s(self, absence: Absence, copied: set[int]) -> float:
        """Return the seconds of transfers that an absence costs."""
        link, size = self._offloader.lower_tier.link, self._size[absence.storage]
        down_s = size / link.offload_bytes_per_s if absence.fresh or absence.storage not in copied else 0.0
        return down_s + (size / link.reload_bytes_per_s if absence.returns else 0.0)

    def choose(self, limit_bytes: int) -> list[Absence]:
        """Choose absences that keep every execution within a limit, in the order of `absences`."""
        level = self._level.copy()
        starting: dict[int, list[int]] = defaultdict(list)
        for number, absence in enumerate(self.absences):
            for start, end in self._ranges(absence):
                if start < end:
                    starting[start].append(number)
        # A storage that the iteration changes has been offloaded before, where memory is short.
        copied = {g.storage for g in self.absences if g.before >= self._count}
        for number in self._offloaded:
            self._shift(level, self.absences[number], -1)
        leaving: dict[bool, list[tuple[float, int]]] = {True: [], False: []}
        chosen: set[int] = set(self._offloaded)
        for position in range(self._count):
            for number in starting.get(position, ()):
                absence = self.absences[number]
                # Time of the next use; an absence that began in the iteration before ends in this one.
                due = absence.before - self._count if position < absence.after + 1 else absence.before
                heappush(leaving[absence.fresh or absence.storage not in copied], (-self._at_s(due), number))
            while level[position] > limit_bytes:
                furthest = self._furthest(position, leaving, chosen, copied)
                if furthest is None:
                    break
                chosen.add(furthest)
                copied.add(self.absences[furthest].storage)
                self._shift(level, self.absences[furthest], -1)
        return [self.absences[n] for n in sorted(self._needed(chosen, level, limit_bytes))]

    def _furthest(
        self, position: int, leaving: dict[bool, list[tuple[float, int]]], chosen: set[int], copied: set[int]
    ) -> int | None:
        """Return the absence around a position that lasts longest for what it costs."""
        best: tuple[float, int] | None = None
        for waiting in leaving.values():
            while waiting and (waiting[0][1] in chosen or -waiting[0][0] <= self._at_s(position)):
                heappop(waiting)
            if waiting:
                due_s, number = -waiting[0][0], waiting[0][1]
                absence = self.absences[number]
                worth = (
                    self._size[absence.storage]
                    * (due_s - self._at_s(position))
                    / max(self._copy_s(absence, copied), 1e-12)
                )
                best = max(best, (worth, number)) if best is not None else (worth, number)
        return best[1] if best is not None else None

    def _needed(self, chosen: set[int], level: _Bytes, limit_bytes: int) -> set[int]:
        """Drop absences that later choices made needless; expensive and short ones first."""
        left = set(chosen)
        for number in sorted(
            chosen - self._offloaded, key=lambda n: (self.absences[n].before - self.absences[n].after, n)
        ):
            absence = self.absences[number]
            self._shift(level, absence, 1)
            if all(level[a:b].max(initial=0) <= limit_bytes for a, b in self._ranges(absence)):
                left.discard(number)
            else:
                self._shift(level, absence, -1)
        return left

    def proposal(self, chosen: Sequence[Absence]) -> Proposal:
        """Return the plan in which the chosen storages are offloaded."""
        steps, state = self._rows.plan(chosen)
        tier = self._offloader.lower_tier
        return Proposal(method=METHOD, steps=steps, state=state, decision=Decision("belady"), tier=tier)
