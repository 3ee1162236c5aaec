"""When each row of a plan begins and ends: computing in order, copies and updates by the CPU beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from stowage.stages.ir.graph import ComputeNode
from stowage.stages.ir.machine import TierState
from stowage.stages.ir.plan import PlanAction
from stowage.stages.ir.trace import Storage
from stowage.stages.simulate.copies import Beside, Copies

if TYPE_CHECKING:
    from stowage.stages.simulate.plan import Step

MOVES: tuple[PlanAction, PlanAction] = ("offload", "reload")


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
            self._copy(storage, storages[storage].nbytes, 0.0, down=storage in start.offloading)
        self._clock = 0.0
        rounds = 2 if any(s.kind == "wait" for s in steps) else 1
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

    def _copy(self, storage: int, nbytes: int, now_s: float, *, down: bool) -> Beside:
        work = self._copies.start(nbytes, now_s, down=down, on_disk=storage in self._on_disk)
        self._under_way[storage] = work
        return work

    def _row(
        self, step: Step, storages: Sequence[Storage], nodes: Sequence[ComputeNode]
    ) -> tuple[float, float] | Beside:
        start = self._clock
        if step.kind == "compute":
            self._clock += nodes[step.node].time_s
        elif step.kind in MOVES:
            return self._copy(step.storage, storages[step.storage].nbytes, start, down=step.kind == "offload")
        elif step.kind == "update":
            there = self._on_disk.intersection(nodes[step.node].mutates)
            seconds, moved = self._cpu_update_s[step.node], sum(storages[s].nbytes for s in there)
            self._under_way[step.storage] = self._copies.update(seconds, start, disk_bytes=moved)
            return self._under_way[step.storage]
        elif step.kind == "wait" and step.storage in self._under_way:  # else an update before the first iteration
            self._clock = max(start, self._copies.finish(self._under_way.pop(step.storage)))
            self.wait_s += self._clock - start
        return start, self._clock
