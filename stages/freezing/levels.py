"""Writes what each row of a plan takes, as a function of the mask.

A storage is in memory between two rows that make or read it if one that reads it later runs, so its guard shrinks from
read to read. A row's own results and workspace count if the row runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from stowage.stages.freezing.outputs import omissible
from stowage.stages.freezing.owners import Owners
from stowage.stages.freezing.projection import Guarded
from stowage.stages.ir.actions import STARTS
from stowage.stages.ir.graph import ComputeNode
from stowage.stages.ir.masked_bytes import MaskedBytes
from stowage.stages.ir.step import Step
from stowage.stages.ir.units import ALWAYS, joined
from stowage.stages.simulate.replay import RANDOM_STATE_BYTES


def levels_of(plan: Guarded, staging_bytes: int = 0) -> list[MaskedBytes]:
    """Return the bytes of each row that takes memory.

    Args:
        plan: the plan with its guards.
        staging_bytes: device memory that the lower tier needs for itself.
    """
    return list(_Levels(plan, staging_bytes).rows())


class _Levels:
    """Goes through the rows, with what is in memory by guard."""

    def __init__(self, plan: Guarded, staging_bytes: int) -> None:
        self._plan = plan
        self._size = [s.nbytes for s in plan.trace.storages]
        self._owners = Owners(plan.trace, plan.nodes, plan.units)
        waiting = self._owners.waiting()
        self._live = {
            s.storage: waiting.get(s.storage, ALWAYS)
            for s in plan.trace.storages
            if s.role != "temporary" and s.storage not in plan.start.offloaded
        }
        self._bytes: Counter[int] = Counter({ALWAYS: staging_bytes})
        for storage, guard in self._live.items():
            self._bytes[guard] += self._size[storage]
        parameters = {s.storage for s in plan.trace.storages if s.role == "parameter"}
        self._updates = {n.node for n in plan.nodes if n.phase == "update" and parameters.intersection(n.mutates)}
        self._collecting: dict[int, tuple[ComputeNode, int]] = {}
        """Collectives under way with their guards, by the first storage that they make."""
        self._together: Counter[int] = Counter()
        """Workspaces of the updates right before, which may be one call of the optimizer with the next."""
        self._states: dict[int, int] = {}
        """Guards of the saved states of the generator, by node."""

    def rows(self) -> Iterator[MaskedBytes]:
        """Yield the levels in the order of the rows."""
        for number, step in enumerate(self._plan.steps):
            if step.kind != "compute" or step.node not in self._updates:
                self._together.clear()
            guard = self._plan.guards.rows[number]
            if step.kind == "compute":
                yield self._computed(number, step, guard)
            elif step.kind in STARTS:
                yield self._started(number, step, guard)
            elif step.kind == "wait" and step.storage in self._collecting:
                yield self._arrived(number, *self._collecting.pop(step.storage))
            elif step.kind == "reload":
                self._take(step.storage, guard)
                yield self._level(number, Counter())
            elif step.kind == "free":
                self._drop(step.storage)
            for storage, after in self._plan.guards.after.get(number, {}).items():
                if storage in self._live:
                    self._drop(storage)
                    self._take(storage, after)

    def _computed(self, number: int, step: Step, guard: int) -> MaskedBytes:
        plan, node = self._plan, self._plan.nodes[step.node]
        outputs = plan.guards.outputs[number]
        workspace = plan.workspaces.of(node, outputs, guard).by_guard()
        own = Counter(workspace)
        optional = {o.storage: o for o in omissible(plan.trace, node, outputs, guard)}
        for storage in node.creates:
            self._take(storage, optional[storage].guard if storage in optional else guard)
        if number in plan.taken:
            own[guard] -= self._size[plan.taken[number]]
        for one in plan.guards.stand_ins.get(number, ()):  # it is there, or something of its form is
            own[joined(guard, one.guard)] += self._size[one.storage]
            own[one.guard] -= self._size[one.storage]
        own.update(self._together)
        if step.node in self._updates:
            self._together.update(workspace)
        before = self._states.get(step.node)
        if node.random and before is not None:
            own[guard] += RANDOM_STATE_BYTES
        later = plan.guards.later_runs.get(number, 0)
        if node.random and before is None and later:
            self._bytes[later] += RANDOM_STATE_BYTES
            self._states[step.node] = later
        level = self._level(number, own)
        if node.random and before is not None:
            self._bytes[before] -= RANDOM_STATE_BYTES
            if later:
                self._bytes[later] += RANDOM_STATE_BYTES
                self._states[step.node] = later
        return level

    def _started(self, number: int, step: Step, guard: int) -> MaskedBytes:
        """Return the level at the start of a collective; a scatter keeps its buffer until it ends."""
        node = self._plan.nodes[step.node]
        level = self._computed(number, step, guard)
        self._collecting[step.storage] = node, guard
        if node.phase == "update":
            self._bytes[guard] += node.workspace_bytes
        return level

    def _arrived(self, number: int, node: ComputeNode, guard: int) -> MaskedBytes:
        """Return the level at the end of a collective; a gather copies its results out of a buffer then."""
        if node.phase == "update":
            self._bytes[guard] -= node.workspace_bytes
            return self._level(number, Counter())
        return self._level(number, Counter({guard: node.workspace_bytes}))

    def _level(self, number: int, own: Counter[int]) -> MaskedBytes:
        found = Counter(self._bytes)
        found.update(own)
        return MaskedBytes(number, {guard: nbytes for guard, nbytes in found.items() if guard and nbytes})

    def _take(self, storage: int, guard: int) -> None:
        self._live[storage] = guard
        self._bytes[guard] += self._size[storage]

    def _drop(self, storage: int) -> None:
        self._bytes[self._live.pop(storage)] -= self._size[storage]
