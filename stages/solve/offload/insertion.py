"""Turns decisions for each step into rows: where each transfer starts, is waited for, and ends among computations."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from stowage.stages.ir.actions import PlanAction
from stowage.stages.ir.graph import ComputeNode
from stowage.stages.ir.machine import TierState
from stowage.stages.ir.step import Step


@dataclass(frozen=True)
class StepTransfers:
    """The storages that are transferred in one step of the cycle (a block's forward or backward).

    Attributes:
        free: dropped from the device at its start; an offload that is under way is waited for first.
        reload: started at its start, after `free`, in the order in which they are needed; reloads that have started
            already go on.
        offload: started after their last use in the step, unless they have started already.
        update: parameters whose update by the CPU starts at its start; their gradients are waited for first.
    """

    free: tuple[int, ...] = ()
    reload: tuple[int, ...] = ()
    offload: tuple[int, ...] = ()
    update: tuple[int, ...] = ()


@dataclass(frozen=True)
class WithTransfers:
    """Rows with transfers, and the state of the tiers in which every iteration starts and ends."""

    steps: list[Step]
    state: TierState


def insert_transfers(
    steps: Sequence[Step],
    step_of: Sequence[int],
    transfers: Sequence[StepTransfers],
    nodes: Sequence[ComputeNode],
    offloaded: frozenset[int],
) -> WithTransfers:
    """Put transfers into a plan without any.

    A transfer that is under way when an iteration ends is under way when the next one starts. What no node changes has
    a copy in the lower tier from the start.

    Args:
        steps: computations and frees of temporary storages.
        step_of: for each of them the step of the cycle, ascending.
        transfers: the transfers of each step of the cycle, and of the end of the iteration, if there is one more.
        nodes: the program.
        offloaded: parameters and states that are offloaded when an iteration starts.
    """
    moving = {s for m in transfers for s in (*m.free, *m.reload, *m.offload, *m.update)} | offloaded
    made = {s for n in nodes for s in n.creates}
    persistent = moving - made
    frozen = persistent.difference(*(n.mutates for n in nodes))
    state = TierState(offloaded=offloaded, copied=offloaded | frozen)
    while True:
        insertion = _Insertion(steps, step_of, transfers, nodes, moving, persistent, state)
        insertion.run()
        end = insertion.end()
        if end == state:
            return WithTransfers(insertion.rows, state)
        if end.offloaded != offloaded:
            raise ValueError("the transfers of the steps do not end where they start")
        state = end


class _Insertion:
    def __init__(
        self,
        steps: Sequence[Step],
        step_of: Sequence[int],
        transfers: Sequence[StepTransfers],
        nodes: Sequence[ComputeNode],
        moving: set[int],
        persistent: set[int],
        state: TierState,
    ) -> None:
        self.steps = steps
        self.step_of = step_of
        self.transfers = transfers
        self.nodes = nodes
        self.moving = moving
        self.persistent = persistent
        self.rows: list[Step] = []
        updated = {s for m in transfers for s in m.update}
        self.update_node = {s: n.node for n in nodes if n.phase == "update" for s in updated.intersection(n.mutates)}
        self.only_down = (
            {s for m in transfers for s in m.offload} - {s for m in transfers for s in m.reload} - persistent
        )
        self.updating = set(state.updating)
        self.offloaded = set(state.offloaded)
        self.reloading = set(state.reloading)
        self.offloading = set(state.offloading)
        self.copied = set(state.copied)
        self.last_use: dict[tuple[int, int], int] = {}
        self.uses: dict[int, list[int]] = defaultdict(list)
        for position, step in enumerate(steps):
            for storage in self._touched(step):
                self.last_use[step_of[position], storage] = position
                self.uses[storage].append(position)
            for storage in self.moving.intersection(nodes[step.node].creates if step.node >= 0 else ()):
                self.last_use[step_of[position], storage] = position

    def _touched(self, step: Step) -> set[int]:
        if step.node < 0:
            return set()
        node = self.nodes[step.node]
        return self.moving.intersection((*node.reads, *node.mutates))

    def _emit(self, action: PlanAction, storage: int, label: str) -> None:
        self.rows.append(Step(-1, storage, label, action))

    def _wait(self, storage: int, label: str) -> None:
        self._emit("wait", storage, label)
        if storage in self.offloading:
            self.offloading.discard(storage)
            self.copied.add(storage)
        self.reloading.discard(storage)
        if storage in self.updating:
            self.updating.discard(storage)
            self.copied.update(self.moving.intersection(self.nodes[self.update_node[storage]].mutates))

    def _update(self, storage: int, label: str) -> None:
        node = self.nodes[self.update_node[storage]]
        for read in sorted({*node.reads, *node.mutates}):
            if read in self.offloading:
                self._wait(read, label)
        self.rows.append(Step(node.node, storage, label, "update"))
        self.copied -= set(node.mutates)
        self.updating.add(storage)

    def _next_use(self, storage: int, position: int) -> int:
        """Return where a storage is used next, in this iteration or the following one."""
        uses = self.uses[storage]
        following = bisect_left(uses, position)
        if following < len(uses):
            return uses[following]
        return len(self.steps) + (uses[0] if uses else 0)

    def _begin(self, transfers: StepTransfers, position: int, label: str) -> None:
        for storage in transfers.free:
            if storage in self.offloading or storage in self.reloading:
                self._wait(storage, label)
            self._emit("free", storage, label)
            self.offloaded.add(storage)
        for storage in transfers.update:
            self._update(storage, label)
        for storage in sorted(transfers.reload, key=lambda s: (self._next_use(s, position), s)):
            if storage not in self.offloaded:
                continue
            if storage in self.updating:
                self._wait(storage, label)
            self._emit("reload", storage, label)
            self.offloaded.discard(storage)
            self.reloading.add(storage)

    def _offload(self, storage: int, label: str) -> None:
        if storage in self.copied or storage in self.offloading:
            return
        self._emit("offload", storage, label)
        self.offloading.add(storage)

    def run(self) -> None:
        """Write all rows."""
        current = -1
        after: dict[int, list[int]] = defaultdict(list)
        for position, step in enumerate(self.steps):
            while current < self.step_of[position]:
                current += 1
                transfers = self.transfers[current]
                self._begin(transfers, position, step.label)
                for storage in transfers.offload:
                    last = self.last_use.get((current, storage))
                    if last is None:
                        self._offload(storage, step.label)
                    else:
                        after[last].append(storage)
            touched = self._touched(step)
            for storage in sorted(touched & self.reloading):
                self._wait(storage, step.label)
            if step.node >= 0:
                node = self.nodes[step.node]
                changed = self.moving.intersection((*node.mutates, *node.creates))
                for storage in sorted(changed & self.offloading):
                    self._wait(storage, step.label)
                self.copied -= changed
            # A gradient that is offloaded for good is freed when its transfer says so, not after its last use.
            if step.node >= 0 or step.storage not in self.only_down:
                self.rows.append(step)
            for storage in after.pop(position, ()):
                self._offload(storage, step.label)
        for transfers in self.transfers[current + 1 :]:
            self._begin(transfers, len(self.steps), "end")

    def end(self) -> TierState:
        """Return the state after the last row."""
        sets = (self.offloaded, self.reloading, self.offloading, self.copied, self.updating)
        return TierState(*(frozenset(found & self.persistent) for found in sets))
