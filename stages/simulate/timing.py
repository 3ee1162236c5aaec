"""Times each row of a plan: computing in order, copies, collectives and updates by the CPU beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stowage.stages.ir.actions import ACTIONS, Kind, LaneName
from stowage.stages.ir.graph import ComputeNode
from stowage.stages.ir.machine import TierState
from stowage.stages.ir.step import Step
from stowage.stages.ir.trace import Storage
from stowage.stages.simulate.copies import Beside, Copies

_ENDING = frozenset(name for name, kind in ACTIONS.items() if kind.ends)
_CONCERNED = frozenset(name for name, kind in ACTIONS.items() if kind.beside or kind.ends)
"""Rows that begin or end what runs beside computing."""
_ON_NODE = frozenset(name for name, kind in ACTIONS.items() if kind.on_node)


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
        self._storages, self._nodes = storages, nodes
        alone_s = [self._alone_s(step) for step in steps]
        rounds = 2 if any(step.kind in _ENDING for step in steps) else 1
        for _ in range(rounds):
            began = self._clock
            self.wait_s = 0.0
            spans = self._spans(steps, alone_s)
        self.period_s = self._clock - began
        self._copies.finish_all()
        self.times: list[tuple[float, float]] = []
        for span in spans:
            start_s, end_s = (span.start_s, span.end_s) if isinstance(span, Beside) else span
            self.times.append((start_s - began, end_s - began))

    def _copy(self, lane: LaneName, storage: int, nbytes: int, now_s: float) -> Beside:
        work = self._copies.copy(lane, nbytes, now_s, on_disk=storage in self._on_disk)
        self._under_way[storage] = work
        return work

    def _alone_s(self, step: Step) -> float | None:
        """Return the seconds of a row to which it does not matter what is under way, None for others."""
        kind = step.kind
        if kind not in _ON_NODE:
            return None if kind in _CONCERNED else 0.0
        if kind in _CONCERNED:
            return None
        node = self._nodes[step.node]
        return None if node.collective else node.time_s

    def _spans(self, steps: Sequence[Step], alone_s: Sequence[float | None]) -> list[tuple[float, float] | Beside]:
        """Return when the rows of one iteration begin and end. Most pass alone: replays spend their time here."""
        found: list[tuple[float, float] | Beside] = []
        clock = self._clock
        for step, seconds in zip(steps, alone_s):
            if seconds is None:
                self._clock = clock
                found.append(self._row(step, ACTIONS[step.kind]))
                clock = self._clock
            else:
                began, clock = clock, clock + seconds
                found.append((began, clock))
        self._clock = clock
        return found

    def _row(self, step: Step, kind: Kind) -> tuple[float, float] | Beside:
        start_s = self._clock
        if kind.transfers:
            return self._copy(kind.lane, step.storage, self._storages[step.storage].nbytes, start_s)
        if kind.beside:
            work = self._under_way[step.storage] = self._work(step, kind)
            return work
        if kind.on_node:
            self._clock = end_s = self._collected(self._nodes[step.node])
            return start_s, end_s
        if kind.ends and step.storage in self._under_way:  # otherwise it is an update before the first iteration
            self._clock = max(start_s, self._copies.finish(self._under_way.pop(step.storage)))
            self.wait_s += self._clock - start_s
        return start_s, self._clock

    def _collected(self, node: ComputeNode) -> float:
        """Return when a collective in the order of what computes ends: it waits for those under way on the network."""
        end_s = self._clock + node.time_s
        done_s = self._copies.finish(self._copies.work("collective", node.time_s, self._clock))
        self.wait_s += max(0.0, done_s - end_s)
        return max(end_s, done_s)

    def _work(self, step: Step, kind: Kind) -> Beside:
        """Queue a node's work beside computing."""
        lane, node = kind.lane, self._nodes[step.node]
        if step.kind != "update":
            return self._copies.work(lane, node.time_s, self._clock)
        moved = sum(self._storages[s].nbytes for s in self._on_disk.intersection(node.mutates))
        return self._copies.update(lane, self._cpu_update_s[step.node], self._clock, disk_bytes=moved)
