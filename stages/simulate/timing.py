"""Times each row of a plan: computing in order, copies, collectives and updates by the CPU beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stowage.stages.ir.actions import ACTIONS, LaneName
from stowage.stages.ir.graph import ComputeNode
from stowage.stages.ir.machine import TierState
from stowage.stages.ir.step import Step
from stowage.stages.ir.trace import Storage
from stowage.stages.simulate.copies import Beside, Copies


class Timing:
    """Times of rows: computing in order, copies beside it. Iterations follow each other, so the second one is timed."""

    def __init__(
        self,
        storages: Sequence[Storage],
        nodes: Sequence[ComputeNode],
        steps: Sequence[Step],
        copies: Copies,
        start: TierState,
        cpu_update_s: Mapping[int, float],
    ) -> None:
        self._copies = copies
        self._on_disk = start.on_disk
        self._under_way: dict[int, Beside] = {}
        self._cpu_update_s = cpu_update_s
        for storage in sorted(start.reloading | start.offloading):
            self._copy("offload" if storage in start.offloading else "reload", storage, storages[storage].nbytes, 0.0)
        self._clock = 0.0
        rounds = 2 if any(ACTIONS[s.kind].ends for s in steps) else 1
        for _ in range(rounds):
            began = self._clock
            self.wait_s = 0.0
            spans = [self._row(step, storages, nodes) for step in steps]
        self.period_s = self._clock - began
        self._copies.finish_all()
        self.times = [
            (span.start_s - began, span.end_s - began)
            if isinstance(span, Beside)
            else (span[0] - began, span[1] - began)
            for span in spans
        ]

    def _copy(self, lane: LaneName, storage: int, nbytes: int, now_s: float) -> Beside:
        work = self._copies.copy(lane, nbytes, now_s, on_disk=storage in self._on_disk)
        self._under_way[storage] = work
        return work

    def _row(
        self, step: Step, storages: Sequence[Storage], nodes: Sequence[ComputeNode]
    ) -> tuple[float, float] | Beside:
        start, kind = self._clock, ACTIONS[step.kind]
        if kind.transfers:
            return self._copy(kind.lane, step.storage, storages[step.storage].nbytes, start)
        if kind.beside:
            work = self._under_way[step.storage] = self._work(step, storages, nodes)
            return work
        if kind.on_node:
            self._compute(nodes[step.node])
        elif kind.ends and step.storage in self._under_way:  # otherwise it is an update before the first iteration
            self._clock = max(start, self._copies.finish(self._under_way.pop(step.storage)))
            self.wait_s += self._clock - start
        return start, self._clock

    def _compute(self, node: ComputeNode) -> None:
        """Let a node compute; a collective needs the ranks' network too, and waits for those under way on it."""
        end_s = self._clock + node.time_s
        if node.collective:
            done_s = self._copies.finish(self._copies.work("collective", node.time_s, self._clock))
            self.wait_s += max(0.0, done_s - end_s)
            end_s = max(end_s, done_s)
        self._clock = end_s

    def _work(self, step: Step, storages: Sequence[Storage], nodes: Sequence[ComputeNode]) -> Beside:
        """Queue a node's work beside computing."""
        lane, node = ACTIONS[step.kind].lane, nodes[step.node]
        if step.kind != "update":
            return self._copies.work(lane, node.time_s, self._clock)
        moved = sum(storages[s].nbytes for s in self._on_disk.intersection(node.mutates))
        return self._copies.update(lane, self._cpu_update_s[step.node], self._clock, disk_bytes=moved)
