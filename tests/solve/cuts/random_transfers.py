"""Legal plans with random transfers: what is in memory in a plan without any may leave between two uses, and come back.

Places in a plan are times: row q of the plan without transfers is at time q + 1, and the step begins anew after the
last. What lasts may leave from its last use in one step until its first in the next.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from stowage.stages.ir.actions import PlanAction
from stowage.stages.ir.graph import ComputeNode
from stowage.stages.ir.machine import TierState
from stowage.stages.ir.step import Step
from stowage.stages.ir.trace import Storage

Span = tuple[float, float]


@dataclass
class RandomTransfers:
    """Inserts transfers into a plan without any.

    Attributes:
        storages, nodes: of the program.
        steps: the plan: computing and freeing.
        leaves: probability that something leaves between two uses.
        eager: whether copies begin as early, and are waited for as late, as they can be; else anywhere.
        on_cpu: updates that the CPU does.
        rng: the source of everything random.
    """

    storages: Sequence[Storage]
    nodes: Sequence[ComputeNode]
    steps: Sequence[Step]
    leaves: float
    eager: bool
    on_cpu: frozenset[int]
    rng: random.Random
    _rows: list[tuple[float, Step]] = field(init=False)

    def plan(self) -> tuple[list[Step], TierState]:
        """The rows, and where everything is when the step begins."""
        run_by_cpu = self.on_cpu
        self._rows = [(q + 1.0, s) for q, s in enumerate(self.steps) if s.kind != "compute" or s.node not in run_by_cpu]
        self._period = len(self.steps) + 1.0
        self._uses: dict[int, list[tuple[float, bool]]] = {}
        for at, step in self._rows:
            if step.kind == "compute":
                node = self.nodes[step.node]
                for s in {*node.reads, *node.mutates, *node.creates}:
                    self._uses.setdefault(s, []).append((at, s in node.mutates or s in node.creates))
        frees = [(at, step.storage) for at, step in self._rows if step.kind == "free"]
        down = {s: self._value(s, frees) for s in sorted(self._uses) if self.storages[s].role == "temporary"}
        updates: dict[int, Span] = {}
        for u in sorted(self.on_cpu):
            updates |= self._update(self.nodes[u], down)
        for storage in self.storages:
            if storage.role != "temporary":
                self._lasting(storage.storage, updates.get(storage.storage))
        rows = [step for _, step in sorted(self._rows, key=lambda r: r[0])]
        return rows, self._state(rows)

    def _update(self, node: ComputeNode, down: Mapping[int, float]) -> dict[int, Span]:
        """Let the CPU update between the copy of the gradient and the weight's first use in the next step."""
        weight = next(s for s in node.mutates if self.storages[s].role == "parameter")
        after = max(down[s] for s in node.reads if s in down)
        after = max([after, *(at for at, _ in self._uses.get(weight, []))])
        (begin,) = self._times(after, self._period, 1)
        (until,) = self._times(begin, self._period + self._first(weight), 1, late=True)
        self._add(begin, weight, "update", node.node)
        self._add(until, weight, "wait")
        return dict.fromkeys(node.mutates, (begin, until))

    def _first(self, s: int) -> float:
        return min((at for at, _ in self._uses.get(s, [])), default=0.0)

    def _value(self, s: int, frees: Sequence[tuple[float, int]]) -> float:
        """Let a value of the step leave between two uses; what the CPU takes is copied before it is freed."""
        uses = self._uses[s]
        gone = [at for at, freed in frees if freed == s]
        copied = False
        for (at, made), (after, remade) in pairwise(uses):
            copied &= not made
            if not remade and self.rng.random() < self.leaves:
                self._away(s, at, after, copied=copied)
                copied = True
        if not any(s in self.nodes[u].reads for u in self.on_cpu):
            return 0.0
        begin, until = self._times(uses[-1][0], min([t for t in gone if t > uses[-1][0]], default=self._period), 2)
        if copied and not uses[-1][1]:
            return uses[-1][0]
        self._add(begin, s, "offload")
        self._add(until, s, "wait")
        return until

    def _lasting(self, s: int, update: Span | None) -> None:
        """Let what lasts leave between two uses, and after the last for what the CPU updates."""
        uses = self._uses.get(s, [])
        if not uses:
            return
        gaps = [(a, b) for (a, _), (b, _) in pairwise(uses)] + [(uses[-1][0], uses[0][0] + self._period)]
        changed = [c for _, c in uses]
        leaving = [self.rng.random() < self.leaves for _ in gaps]
        leaving[-1] |= update is not None
        clean = not any(changed)
        for k in range(len(gaps)):  # as it is when the step begins, after the step before
            clean = leaving[k] or (clean and not changed[k])
        for k, (at, after) in enumerate(gaps):
            clean &= not changed[k]
            if leaving[k]:
                self._away(s, at, after, copied=clean, update=update if k + 1 == len(gaps) else None)
                clean = True

    def _away(self, s: int, at: float, after: float, *, copied: bool, update: Span | None = None) -> None:
        if update is None:
            begin, until, free, back, there = self._times(at, after, 5)
        else:
            begin, until, free = self._times(at, update[0], 3)
            back, there = self._times(update[1], after, 2)
        if not copied:
            self._add(begin, s, "offload")
            self._add(until, s, "wait")
        self._add(free, s, "free")
        self._add(back, s, "reload")
        self._add(there, s, "wait")

    def _times(self, begin: float, end: float, count: int, *, late: bool = False) -> list[float]:
        """So many times in order between two: anywhere, or the first right after, and the last right before."""
        found = sorted(self.rng.uniform(begin, end) for _ in range(count))
        little = 1e-3 * min(1.0, end - begin)
        if self.eager and not late:
            found[0] = begin + little * self.rng.uniform(0.1, 0.4)
        if self.eager and (late or count > 1):
            found[-1] = end - little * self.rng.uniform(0.1, 0.4)
        return found

    def _add(self, at: float, s: int, action: PlanAction, node: int = -1) -> None:
        self._rows.append((at if at < self._period else at - self._period, Step(node, s, "", action)))

    def _state(self, rows: Sequence[Step]) -> TierState:
        """Where everything is after steps without end: what the rows say, twice."""
        lasting = {s.storage for s in self.storages if s.role != "temporary"}
        moved = {s.storage for s in rows if s.kind in ("offload", "reload")} & lasting
        by_cpu = {s for u in self.on_cpu for s in self.nodes[u].mutates}
        below = {s for s in by_cpu if s not in self._uses}
        live, reloading, offloading, updating = lasting - below, set[int](), set[int](), set[int]()
        copied = moved | by_cpu
        for step in (*rows, *rows):
            s = step.storage
            if step.kind == "compute":
                changed = {*self.nodes[step.node].mutates, *self.nodes[step.node].creates}
                copied -= changed
            elif step.kind == "free":
                live.discard(s)
            elif step.kind == "reload":
                live.add(s)
                reloading.add(s)
            elif step.kind == "offload":
                offloading.add(s)
            elif step.kind == "update":
                copied -= set(self.nodes[step.node].mutates)
                updating.add(s)
            elif s in reloading:
                reloading.discard(s)
            elif s in offloading:
                offloading.discard(s)
                copied.add(s)
            elif s in updating:
                updating.discard(s)
                copied |= {p for u in self.on_cpu for p in self.nodes[u].mutates if s in self.nodes[u].mutates}
        return TierState(
            offloaded=frozenset(lasting - live),
            reloading=frozenset(reloading & lasting),
            offloading=frozenset(offloading & lasting),
            copied=frozenset(copied & lasting),
            updating=frozenset(updating),
        )
