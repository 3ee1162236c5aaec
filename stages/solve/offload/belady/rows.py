"""Writes the rows of chosen absences: transfers, and updates by the CPU, that nothing hides yet."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from stowage.stages.ir.actions import PlanAction
from stowage.stages.ir.machine import TierState
from stowage.stages.ir.step import Step
from stowage.stages.solve.offload.belady.late_updates import LateUpdate
from stowage.stages.solve.program.chain import Execution
from stowage.stages.solve.program.program import StepProgram


@dataclass(frozen=True)
class Absence:
    """A stretch of executions during which a storage may be offloaded.

    Attributes:
        storage: the storage's number.
        after: position of its last use before; -1 where it is there when the iteration starts.
        before: position of its next use; beyond the number of executions where that is in the next iteration, and that
            number where there is none.
        fresh: whether its content has been made or changed since the absence before.
        returns: whether it is reloaded.
    """

    storage: int
    after: int
    before: int
    fresh: bool
    returns: bool = True


class BeladyRows:
    """Writes the rows for some absences.

    Attributes:
        complete: position at which what is offloaded for an update by the CPU is complete.
    """

    def __init__(
        self,
        program: StepProgram,
        executions: Sequence[Execution],
        updates: Sequence[LateUpdate],
        persistent: frozenset[int],
    ) -> None:
        """Take `executions` without `updates`, which are in the order in which the CPU takes them."""
        self._program = program
        self._executions = executions
        self._count = len(executions)
        self._persistent = persistent
        self._updates = updates
        self._weights = frozenset(u.weight for u in updates)
        self._changed_in_lower_tier = frozenset(s for u in updates for s in u.node.mutates)
        self._changed = [frozenset((*n.mutates, *n.creates)) for n in program.nodes]
        wanted = {s for u in updates for s in u.down} | self._weights
        self.complete: dict[int, int] = {}
        last_use: dict[int, int] = {}
        for position, execution in enumerate(executions) if updates else ():
            node = program.nodes[execution.node]
            self.complete.update(dict.fromkeys(wanted.intersection(self._changed[node.node]), position))
            last_use.update(dict.fromkeys(self._weights.intersection(node.reads), position))
        self._going_down: dict[int, list[int]] = defaultdict(list)
        for storage, position in self.complete.items():
            self._going_down[position].append(storage)
        self._starting: dict[int, list[LateUpdate]] = defaultdict(list)
        self._awaited: dict[int, list[LateUpdate]] = defaultdict(list)
        ready = [max([last_use[u.weight], *(self.complete[s] for s in u.down)]) for u in updates]
        for update, position in zip(updates, ready):
            self._starting[position].append(update)
        for update, position in zip(updates, self._ends(ready)):
            self._awaited[position].append(update)

    def _ends(self, ready: Sequence[int]) -> list[int]:
        """Return the positions in the next iteration at which updates are done, as if computing never waited.

        They are at the latest those of the weights' next uses.
        """
        ends: list[float] = [0.0]
        for execution in self._executions:
            ends.append(ends[-1] + self._program.nodes[execution.node].time_s)
        order = sorted(range(len(ready)), key=lambda i: ready[i])
        done_s, position, found = 0.0, 0, dict[int, int]()
        for i in order:
            update = self._updates[i]
            done_s = max(done_s, ends[ready[i] + 1]) + update.time_s
            while position < self._count and ends[position] < done_s - ends[-1]:
                position += 1
            found[i] = min(position, update.first_use)
        return [found[i] for i in range(len(ready))]

    def plan(self, chosen: Sequence[Absence]) -> tuple[list[Step], TierState]:
        """Return the rows, and the state of the tiers in which every iteration starts and ends."""
        program = self._program
        persistent = {g.storage for g in chosen} & self._persistent
        changing = {s for n in program.nodes for s in n.mutates}
        offloaded = frozenset(
            g.storage for g in chosen if g.storage in self._persistent and (g.before >= self._count or g.after < 0)
        )
        copied = (offloaded | (persistent - changing)) - self._changed_in_lower_tier
        steps, end = self._rows(chosen, offloaded, copied)
        if end & persistent != copied - program.consumed:
            copied = (end & persistent) | (copied & program.consumed)
            steps, _ = self._rows(chosen, offloaded, copied)
        return steps, TierState(offloaded=offloaded, copied=copied, updating=self._weights)

    def _rows(
        self, chosen: Sequence[Absence], offloaded: frozenset[int], copied: frozenset[int]
    ) -> tuple[list[Step], frozenset[int]]:
        """Return the rows, and the storages that have a copy in the lower tier at the end."""
        leaving: dict[int, list[int]] = defaultdict(list)
        coming: dict[int, list[int]] = defaultdict(list)
        for gap in chosen:
            leaving[gap.after].append(gap.storage)
            if gap.returns and (gap.before != self._count or gap.after >= 0):
                coming[gap.before % self._count].append(gap.storage)
        valid = set(copied)
        under_way: set[int] = set()
        rows: list[Step] = []

        def put(action: PlanAction, storage: int, label: str) -> None:
            rows.append(Step(-1, storage, label, action))

        def down(storage: int, label: str) -> None:
            if storage in under_way:
                put("wait", storage, label)
                under_way.discard(storage)

        def end(position: int, label: str) -> None:
            for storage in leaving[position]:
                if position < 0 and storage in offloaded:
                    continue
                if storage not in valid:
                    put("offload", storage, label)
                    put("wait", storage, label)
                    valid.add(storage)
                put("free", storage, label)
            for update in self._starting[position]:
                for storage in update.down:
                    down(storage, label)
                rows.append(Step(update.node.node, update.weight, label, "update"))
                valid.difference_update(update.node.mutates)

        position, label = -1, ""
        for step in self._program.steps(self._executions):
            if step.node < 0:
                down(step.storage, label)
                rows.append(step)
                continue
            end(position, label)
            position, label = position + 1, step.label
            for update in self._awaited[position]:
                put("wait", update.weight, label)
                valid |= self._persistent.intersection(update.node.mutates)
            for storage in coming[position]:
                put("reload", storage, label)
                put("wait", storage, label)
            valid -= self._changed[step.node]
            rows.append(step)
            for storage in self._going_down[position]:
                put("offload", storage, label)
                under_way.add(storage)
        end(position, label)
        return rows, frozenset(valid)
