"""Runs collectives beside computing: starts gathers before their readers, and ends scatters after other work.

A plan is made as if a collective were computed in its place. Here its row is split into a start and a `wait`. A gather
starts so early that it is done when its first reader begins, if the budget has room for the weight until then; shards
that come from the lower tier are reloaded before that. The wait for a scatter, with the update that reads it, comes so
late that nobody waits, if there is room for the gradient; a shard of it that is offloaded leaves then.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from stowage.stages.ir.graph import ComputeNode
from stowage.stages.ir.step import Step
from stowage.stages.simulate.plan import Outcome

Judge = Callable[[Sequence[Step]], Outcome | None]

LEADS = (1.0, 1.5, 3.0)
"""Factors by which collectives are taken to be longer than they are, since they wait for each other."""


@dataclass(frozen=True)
class _Moves:
    """What moves besides gathers.

    Attributes:
        scatters: waits for scatters, and updates that read what they make.
        transfers: reloads of the shards that a gather reads, and offloads of what a scatter makes.
    """

    scatters: bool
    transfers: bool


MOVES = (_Moves(scatters=True, transfers=True), _Moves(scatters=True, transfers=False), _Moves(False, False))
"""What is tried, until the referee finds it legal."""


def overlap(
    steps: Sequence[Step],
    outcome: Outcome,
    nodes: Sequence[ComputeNode],
    nbytes: Sequence[int],
    budget_bytes: int,
    judge: Judge,
) -> tuple[list[Step], Outcome]:
    """Return the plan with its collectives beside computing, where the referee finds it faster.

    Args:
        steps: the rows of a plan within the budget.
        outcome: the referee's outcome of that plan.
        nodes: the compute nodes.
        nbytes: bytes of each storage.
        budget_bytes: bytes that no row may exceed.
        judge: the referee; returns None for a plan that it refuses.
    """
    best, judged = list(steps), outcome
    rows = _rows_of(steps, outcome, nodes)
    for lead in LEADS:
        for what in MOVES:
            moved = _Overlap(steps, outcome, nodes, nbytes, budget_bytes, lead, rows, what).run()
            found = judge(moved)
            if found is not None and found.peak_bytes <= budget_bytes:
                if found.time_s < judged.time_s:
                    best, judged = moved, found
                break
    return best, judged


@dataclass(frozen=True)
class _Rows:
    """What the rows of a plan do.

    Attributes:
        at_s: when each row would begin if collectives took no time of computing.
        touched: storages that each row needs as they are, or changes.
        of_storage: the rows that touch each storage, in their order.
        changing: the rows among them that move, free or change it.
    """

    at_s: list[float]
    touched: list[frozenset[int]]
    of_storage: Mapping[int, list[int]]
    changing: Mapping[int, list[int]]


def _rows_of(steps: Sequence[Step], outcome: Outcome, nodes: Sequence[ComputeNode]) -> _Rows:
    at_s: list[float] = []
    touched: list[frozenset[int]] = []
    shift_s = 0.0
    for step, (start_s, end_s) in zip(steps, outcome.times, strict=True):
        at_s.append(start_s - shift_s)
        if _is_collective(step, nodes):
            shift_s += end_s - start_s
        if step.node >= 0:
            node = nodes[step.node]
            touched.append(frozenset({*node.reads, *node.mutates, *node.creates}))
        else:
            touched.append(frozenset({step.storage}))
    # A row that is timed beside computing may begin later than those after it.
    latest = 0.0
    for i, start_s in enumerate(at_s):
        latest = at_s[i] = max(latest, start_s) if start_s == start_s else latest
    of_storage: dict[int, list[int]] = defaultdict(list)
    changing: dict[int, list[int]] = defaultdict(list)
    for i, (step, storages) in enumerate(zip(steps, touched, strict=True)):
        for storage in storages:
            of_storage[storage].append(i)
        for storage in nodes[step.node].mutates if step.kind == "compute" else storages:
            changing[storage].append(i)
    return _Rows(at_s, touched, of_storage, changing)


def _is_collective(step: Step, nodes: Sequence[ComputeNode]) -> bool:
    return step.kind == "compute" and nodes[step.node].collective


@dataclass(frozen=True)
class _Reload:
    """A reload of a shard: its row, the row that waits for it, and the last row before it that touches the shard."""

    row: int
    wait: int
    before: int


class _Overlap:
    """Moves the rows of one plan."""

    def __init__(
        self,
        steps: Sequence[Step],
        outcome: Outcome,
        nodes: Sequence[ComputeNode],
        nbytes: Sequence[int],
        budget_bytes: int,
        lead: float,
        rows: _Rows,
        moves: _Moves,
    ) -> None:
        self.steps, self.nodes, self.nbytes, self.lead = steps, nodes, nbytes, lead
        self.moves = moves
        self.time_s = [end_s - start_s for start_s, end_s in outcome.times]
        self.room = np.array([budget_bytes - row.peak_bytes for row in outcome.untimed], dtype=np.int64)
        self.rows = rows
        self.key: dict[int, float] = {}
        """Position of a row that moves."""
        self.started: dict[int, float] = {}
        """Position of the start of a collective, by the row that computed it; that row becomes its wait."""

    def run(self) -> list[Step]:
        """Return the rows in their new order."""
        collectives = [i for i, step in enumerate(self.steps) if _is_collective(step, self.nodes)]
        updates = {i for i in collectives if self.nodes[self.steps[i].node].phase == "update"}
        begins_s = float("inf")
        for i in reversed([i for i in collectives if i not in updates]):
            begins_s = self._start_early(i, begins_s)
        free_s = 0.0
        for i in sorted(updates) if self.moves.scatters else ():
            free_s = self._end_late(i, free_s)
        rows: list[tuple[float, int, Step]] = []
        for i, step in enumerate(self.steps):
            if i in self.started:
                node = self.nodes[step.node]
                storage = node.creates[0]
                action: Step = Step(step.node, storage, step.label, "scatter" if i in updates else "gather")
                rows.append((self.started[i], 2 * i, action))
                step = Step(-1, storage, step.label, "wait")
            rows.append((self.key.get(i, float(i)), 2 * i + 1, step))
        return [step for _, _, step in sorted(rows, key=lambda row: row[:2])]

    def _start_early(self, i: int, begins_s: float) -> float:
        """Start the gather of row `i` before it; return when the lane has to be free for it."""
        node = self.nodes[self.steps[i].node]
        reloads = self._reloads(i, node) if self.moves.transfers else {}
        shards = sum(self.nbytes[s] for s in reloads)
        need = sum(self.nbytes[s] for s in node.creates) + shards
        wanted_s = min(self.rows.at_s[i], begins_s) - self.lead * node.time_s
        first = max(self._row_at(wanted_s, i), self._latest_change(i, node, reloads) + 1, 0)
        full = np.flatnonzero(self.room[first:i] < need)
        first += int(full[-1]) + 1 if full.size else 0
        startable = np.flatnonzero(self.room[first:i] >= need + node.workspace_bytes)
        if not startable.size:
            return min(self.rows.at_s[i], begins_s)
        first += int(startable[0])
        self.room[first:i] -= need - shards
        self.started[i] = first - 0.5
        for storage, found in reloads.items():
            self._reload_before(storage, found, first)
        return min(begins_s, max(self.rows.at_s[first], wanted_s))

    def _row_at(self, time_s: float, end: int) -> int:
        """Return the last row before `end` that begins no later than a time."""
        return bisect_right(self.rows.at_s, time_s, 0, end + 1) - 1

    def _reloads(self, i: int, node: ComputeNode) -> dict[int, _Reload]:
        """Return the reloads of shards that the gather of row `i` reads, and that it alone waits for."""
        found: dict[int, _Reload] = {}
        for storage in node.reads:
            rows = self.rows.of_storage.get(storage, [])
            at = bisect_left(rows, i)
            if at >= 2 and self.steps[rows[at - 1]].kind == "wait" and self.steps[rows[at - 2]].kind == "reload":
                before = rows[at - 3] if at >= 3 else -1
                found[storage] = _Reload(rows[at - 2], rows[at - 1], before)
        return found

    def _reload_before(self, storage: int, found: _Reload, first: int) -> None:
        """Wait for a reload before row `first`, and start it so early that it is over then, as far as there is room."""
        if found.wait >= first:
            self.key[found.wait] = first - 0.6
        started_s = self.rows.at_s[first] - self.lead * self.time_s[found.row]
        target = max(self._row_at(started_s, first), found.before + 1, 0)
        size = self.nbytes[storage]
        full = np.flatnonzero(self.room[target : min(first, found.row)] < size)
        target += int(full[-1]) + 1 if full.size else 0
        if target < found.row or first <= found.row:
            self.room[target : found.row] -= size
            self.key[found.row] = target - 0.7

    def _latest_change(self, i: int, node: ComputeNode, reloads: Mapping[int, _Reload]) -> int:
        """Return the last row before row `i` that changes what a node reads, or touches an old copy of what it makes.

        A reload that can be moved changes nothing. It is -1 where there is none.
        """
        of_made = (self.rows.of_storage.get(s, ()) for s in node.creates)
        of_read = (self.rows.changing.get(s, ()) for s in node.reads if s not in reloads)
        found = max((r.before for r in reloads.values()), default=-1)
        for rows in (*of_made, *of_read):
            before = bisect_left(rows, i)
            found = max(found, rows[before - 1] if before else -1)
        return found

    def _end_late(self, i: int, free_s: float) -> float:
        """Wait for the scatter of row `i` later, and update later; return when the lane is free again."""
        node = self.nodes[self.steps[i].node]
        done_s = max(free_s, self.rows.at_s[i]) + self.lead * node.time_s
        moving, limit = self._dependents(i)
        if not moving:
            return done_s
        held = sum(self.nbytes[s] for s in {*node.reads, *node.creates}) + node.workspace_bytes
        limit = bisect_left(self.rows.at_s, done_s, i + 1, max(limit, i + 1))
        own = set(moving)
        full = (i + 1 + int(k) for k in np.flatnonzero(self.room[i + 1 : limit] < held))
        last = next((k for k in full if k not in own), limit) - 1
        if last == i:
            return done_s
        self.room[i + 1 : last + 1] -= held
        self.started[i] = i - 0.25
        late = [i, *moving]
        for number, row in enumerate(late):
            if row == i or row <= last:
                self.key[row] = last + 0.25 + 1e-6 * number + 1e-4 * (i / (len(self.steps) + 1))
        return done_s

    def _dependents(self, i: int) -> tuple[list[int], int]:
        """Return the rows that must follow the scatter of row `i` and can be put off with it, and where they must end.

        These are rows that free what it reads, and the norm or the update that reads its shard; where the CPU updates,
        the rows that offload the shard, wait for that, and start the update.
        """
        node = self.nodes[self.steps[i].node]
        touched = set(node.creates) | set(node.reads)
        moving: list[int] = []
        for k in self._following(i, touched):
            step = self.steps[k]
            is_update = step.kind == "compute" and self.nodes[step.node].phase == "update"
            leaves = self.moves.transfers and (
                step.kind == "update" or (step.kind in ("offload", "wait") and step.storage in node.creates)
            )
            if step.kind != "free" and not leaves and not (is_update and not self.nodes[step.node].collective):
                return moving, k
            if is_update and len(self.nodes[step.node].mutates) == 0 and len(self.nodes[step.node].reads) > 1:
                return moving, k  # the scale of clipping waits for all norms
            moving.append(k)
            if step.node >= 0:
                touched |= self.rows.touched[k]
        return moving, len(self.steps)

    def _following(self, i: int, touched: Collection[int]) -> Iterator[int]:
        """Yield the rows after row `i` that touch a storage of a set, in their order; the set may grow meanwhile."""
        waiting: list[int] = []
        known: set[int] = set()
        latest = i
        while True:
            for storage in set(touched) - known:
                known.add(storage)
                rows = self.rows.of_storage.get(storage, [])
                for k in rows[bisect_right(rows, latest) :]:
                    heappush(waiting, k)
            while waiting and waiting[0] <= latest:
                heappop(waiting)
            if not waiting:
                return
            latest = heappop(waiting)
            yield latest
