"""Makes a plan of node executions.

It drops executions nobody reads, frees everything right after its last use, and retains instead of recomputing where
memory is left.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import chain
from types import MappingProxyType

import numpy as np

from stowage.stages.ir.executions import first_runs, needed_runs
from stowage.stages.ir.graph import SHARED, ComputeNode
from stowage.stages.ir.step import Step
from stowage.stages.ir.trace import Storage
from stowage.stages.simulate.replay import RANDOM_STATE_BYTES
from stowage.stages.solve.program.chain import Execution
from stowage.stages.solve.program.range_minima import RangeMinima


def shared_storages(nodes: Iterable[ComputeNode]) -> set[int]:
    """Return what is made outside all blocks and read inside: masks, positions."""
    nodes = list(nodes)
    made = {s for n in nodes if n.block == SHARED for s in n.creates}
    return made.intersection(s for n in nodes if n.block != SHARED for s in n.reads)


class StepProgram:
    """Storages and nodes, and what of them an iteration leaves behind.

    Attributes:
        keep: temporary storages that must exist at its end.
        consumed: waiting gradients that must not exist at its end.
        gradients: those of `keep` that stay in `.grad` as they are, with the names of their parameters.
        pinned: parameters and states that stay on the device, because one update needs all of them there.
    """

    def __init__(
        self,
        storages: Sequence[Storage],
        nodes: Sequence[ComputeNode],
        keep: frozenset[int],
        consumed: frozenset[int] = frozenset(),
        gradients: Mapping[int, str] = MappingProxyType({}),
        pinned: frozenset[int] = frozenset(),
    ) -> None:
        self.storages = storages
        self.nodes = nodes
        self.keep = keep
        self.consumed = consumed
        self.gradients = gradients
        self.pinned = pinned
        self.kept = keep | {s.storage for s in storages if s.role == "gradient"} - consumed
        self.temporary = frozenset(s.storage for s in storages if s.role == "temporary")
        self.reads = [tuple(s for s in n.reads if s in self.temporary) for n in nodes]
        self.nbytes = [s.nbytes for s in storages]
        self._sizes = np.array(self.nbytes, dtype=np.int64)
        self.base_bytes = sum(s.nbytes for s in storages if s.role != "temporary")
        self._workspace = np.array([n.workspace_bytes for n in nodes], dtype=np.int64)
        self._random = any(n.random for n in nodes)
        self._summands = frozenset(s for n in nodes for s in n.takes)

    @cached_property
    def shared_bytes(self) -> int:
        """Return the bytes of what is made outside all blocks and read inside."""
        return sum(self.nbytes[s] for s in shared_storages(self.nodes))

    def uncounted_bytes(self, of_blocks: Iterable[int]) -> int:
        """Return the bytes that the chain does not count: shared storages, and what blocks keep for others.

        Args:
            of_blocks: the storages that blocks know of.
        """
        for_others = {s for n in self.nodes if n.block != SHARED for s in n.creates}.difference(of_blocks)
        return sum(self.nbytes[s] for s in shared_storages(self.nodes) | for_others)

    def without_dead(self, executions: Sequence[Execution]) -> list[Execution]:
        """Drop repeated executions whose results nobody reads.

        First executions stay: they draw random numbers and have effects, in eager's order.
        """
        order = [execution.node for execution in executions]
        kept = needed_runs(
            order, first_runs(order), set(self.keep), lambda k: self.nodes[k].creates, self.reads.__getitem__
        )
        return [executions[position] for position in kept]

    def last_uses(self, executions: Sequence[Execution]) -> dict[tuple[int, int], int]:
        """Return (storage, position where it is made) -> position of the last read of that copy.

        What is consumed was made before the iteration, at -1.
        """
        made: dict[int, int] = {}
        last: dict[tuple[int, int], int] = {}
        for position, execution in enumerate(executions):
            node = self.nodes[execution.node]
            for storage in self.consumed.intersection(node.reads) if self.consumed else ():
                last[storage, -1] = position
            for storage in self.reads[node.node]:
                last[storage, made[storage]] = position
            for storage in node.creates:
                made[storage] = position
                last[storage, position] = position
        for storage in self.keep:
            last[storage, made[storage]] = len(executions)
        return last

    def steps(self, executions: Sequence[Execution]) -> list[Step]:
        """Return the plan: every copy freed right after its last use."""
        dying: dict[int, list[int]] = defaultdict(list)
        for (storage, _), position in self.last_uses(executions).items():
            dying[position].append(storage)
        found: list[Step] = []
        for position, execution in enumerate(executions):
            found.append(Step(execution.node, -1, execution.label))
            found.extend(Step(-1, s, execution.label) for s in sorted(dying[position]))
        return found

    def cycle_steps(self, executions: Sequence[Execution]) -> list[int]:
        """Return the step of the cycle that each row of `steps` belongs to."""
        rows = iter(executions)
        found: list[int] = []
        current = 0
        for step in self.steps(executions):
            if step.node >= 0:
                current = next(rows).step
            found.append(current)
        return found

    def peak_bytes(self, executions: Sequence[Execution]) -> int:
        """Return the highest device bytes; the same number as the referee's, without its checks."""
        return self.base_bytes + int(self._exact_level(executions).max(initial=0))

    def levels(self, executions: Sequence[Execution]) -> list[int]:
        """Return the device bytes during each execution; the same numbers as the referee's."""
        found: list[int] = (self.base_bytes + self._exact_level(executions)).tolist()
        return found

    def _exact_level(self, executions: Sequence[Execution]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Return what `profile` does, less the memory that sums take."""
        last = self.last_uses(executions)
        level = self._level(executions, last)
        for position, dying in self.sums(executions, last).items():
            level[position] -= self.nbytes[dying[0]]
        return level

    def sums(self, executions: Sequence[Execution], last: Mapping[tuple[int, int], int]) -> dict[int, tuple[int, ...]]:
        """Return the positions of sums that may be written over a summand, with the summands that die there."""
        if not self._summands:
            return {}
        summands, nodes = self._summands, self.nodes
        ends: dict[int, set[int]] = {}
        for (storage, _), position in last.items():
            if storage in summands:
                ends.setdefault(position, set()).add(storage)
        found = {}
        for position in sorted(ends):
            if position < len(executions):
                takes = tuple(s for s in nodes[executions[position].node].takes if s in ends[position])
                if takes:
                    found[position] = takes
        return found

    def profile(self, executions: Sequence[Execution]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Return the bytes above the baseline during each execution, workspace included.

        It is an upper bound, as if no sum took a summand's memory: it is used to decide what else can be kept.
        """
        return self._level(executions, self.last_uses(executions))

    def _level(
        self, executions: Sequence[Execution], last: Mapping[tuple[int, int], int]
    ) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Return what `profile` does, where the last uses are known."""
        change = np.zeros(len(executions) + 1, dtype=np.int64)
        copies = np.fromiter(chain.from_iterable(last), dtype=np.int64, count=2 * len(last)).reshape(-1, 2)
        ends = np.fromiter(last.values(), dtype=np.int64, count=len(last)) + 1
        sizes, starts = self._sizes[copies[:, 0]], copies[:, 1]
        made, dies = starts >= 0, ends <= len(executions)
        np.add.at(change, starts[made], sizes[made])
        np.subtract.at(change, ends[dies], sizes[dies])
        positions: dict[int, list[int]] = defaultdict(list)
        for position, execution in enumerate(executions) if self._random else ():
            if self.nodes[execution.node].random:
                positions[execution.node].append(position)
        for where in positions.values():
            if len(where) > 1:
                change[where[0]] += RANDOM_STATE_BYTES
                change[where[-1] + 1] -= RANDOM_STATE_BYTES
        ran = np.fromiter((e.node for e in executions), dtype=np.int64, count=len(executions))
        workspace = self._workspace[ran]
        for where in positions.values():
            workspace[where[1:]] += RANDOM_STATE_BYTES
        found: np.ndarray[tuple[int], np.dtype[np.int64]] = np.cumsum(change)[:-1] + workspace
        return found

    def retain_where_possible(self, executions: list[Execution], budget_bytes: int) -> list[Execution]:
        """Remove recomputations, most expensive per byte first, as long as keeping the earlier copy fits the budget.

        Removing one frees what it read earlier, which can make room for another: repeat until nothing changes. Room is
        counted as if no sum took a summand's memory.
        """
        current = executions
        while True:
            last = self.last_uses(current)
            room = budget_bytes - self.base_bytes - self._level(current, last)
            removed = self._one_pass(current, last, room)
            if not removed:
                return current
            current = self.without_dead([e for i, e in enumerate(current) if i not in removed])

    def _one_pass(
        self,
        executions: Sequence[Execution],
        last: Mapping[tuple[int, int], int],
        room: np.ndarray[tuple[int], np.dtype[np.int64]],
    ) -> set[int]:
        copies = _Copies(last)
        seen: set[int] = set()
        candidates: list[tuple[float, int]] = []
        for position, execution in enumerate(executions):
            node = self.nodes[execution.node]
            copies.made(node.creates, position)
            if node.node in seen:
                spans = copies.spans(node.creates, position)
                byte_rows = sum(self.nbytes[s] * max(end - start, 0) for s, start, end in spans)
                candidates.append((-node.time_s / max(byte_rows, 1), position))
            seen.add(node.node)
        at_most = RangeMinima(room)  # within a pass room only shrinks
        for _, position in sorted(candidates):
            created = self.nodes[executions[position].node].creates
            spans = copies.spans(created, position)
            # Where room is missing, a sum takes the memory of a summand that dies there.
            if any(
                room[low - 1] < 0 or (low < high and at_most.of(low, high) < self.nbytes[s]) for s, low, high in spans
            ):
                continue
            if self._make_room(room, spans):
                copies.remove(created, position)
        return copies.removed

    def _make_room(self, room: np.ndarray[tuple[int], np.dtype[np.int64]], spans: list[tuple[int, int, int]]) -> bool:
        """Take the bytes of (storage, from, until) spans out of `room`, if they fit."""
        spans = [span for span in spans if span[1] < span[2]]
        if not spans:
            return True
        start, end = min(low for _, low, _ in spans), max(high for _, _, high in spans)
        extra = np.zeros(end - start, dtype=np.int64)
        for storage, low, high in spans:
            extra[low - start : high - start] += self.nbytes[storage]
        if np.any(room[start:end] < extra):
            return False
        room[start:end] -= extra
        return True


class _Copies:
    """Follows copies of storages in an order of executions, some of which are removed.

    The copy before a removed execution then lasts longer.

    Attributes:
        removed: positions of executions that were removed.
    """

    def __init__(self, last: Mapping[tuple[int, int], int]) -> None:
        self._last = last
        self._before: dict[tuple[int, int], int] = {}
        self._newest: dict[int, int] = {}
        self._longer: set[tuple[int, int]] = set()
        self.removed: set[int] = set()

    def made(self, storages: Sequence[int], position: int) -> None:
        """Note copies, in order of their positions."""
        for storage in storages:
            if storage in self._newest:
                self._before[storage, position] = self._newest[storage]
            self._newest[storage] = position

    def _wanted(self, storage: int, position: int) -> bool:
        """Return whether anything reads the copy, be it in the place of a later one."""
        return self._last[storage, position] > position or (storage, position) in self._longer

    def _source(self, storage: int, position: int) -> int:
        """Return the copy that takes the place of one: the one before, of those that were not removed unread."""
        source = self._before[storage, position]
        while source in self.removed and not self._wanted(storage, source):
            source = self._before[storage, source]
        return source

    def spans(self, storages: Sequence[int], position: int) -> list[tuple[int, int, int]]:
        """Return (storage, from, until): what would be in memory besides, if this execution were removed."""
        return [
            (s, self._last[s, self._source(s, position)] + 1, position) for s in storages if self._wanted(s, position)
        ]

    def remove(self, storages: Sequence[int], position: int) -> None:
        """Remove an execution."""
        for s in storages:
            if self._wanted(s, position):
                self._longer.add((s, self._source(s, position)))
        self.removed.add(position)
