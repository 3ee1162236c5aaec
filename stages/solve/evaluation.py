"""Plans a forward alone, for evaluation: every node once, in eager's order; weights are reloaded when they are read.

Weights do not change, so a copy in the lower tier stays up to date and dropping them costs nothing. What is on the
device between training iterations stays there, as far as the budget admits; optimizer states are offloaded first,
since nothing reads them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from stowage.stages.ir.graph import SHARED, ComputeNode
from stowage.stages.ir.machine import TierState
from stowage.stages.ir.step import Step
from stowage.stages.ir.trace import TraceTables
from stowage.stages.ir.updates import left_behind
from stowage.stages.solve.binding import infeasible
from stowage.stages.solve.offload.tier import LowerTier
from stowage.stages.solve.program.chain import Execution
from stowage.stages.solve.program.program import StepProgram
from stowage.stages.solve.proposal import Decision, JudgedPlan
from stowage.stages.solve.referee import Referee
from stowage.stages.solve.request import PlanRequest
from stowage.stages.solve.summary import KeepingAll, Solved, solved

METHOD = "forward"
_Bytes = np.ndarray[tuple[int], np.dtype[np.int64]]


@dataclass
class _Stay:
    """A stretch of nodes for which an offloaded weight is on the device.

    Attributes:
        storage: the weight's storage.
        first, last: nodes that read it, by position.
        start: the position at which its reload starts.
    """

    storage: int
    first: int
    last: int
    start: int


def solve_forward(
    trace: TraceTables,
    nodes: Sequence[ComputeNode],
    *,
    device_budget_bytes: int,
    lower_tier: LowerTier | None = None,
    offloaded_at_rest: frozenset[int] = frozenset(),
    tier_in_use: bool = False,
    device: str = "",
    device_fingerprint: str = "",
) -> Solved:
    """Plan a forward alone.

    Args:
        trace: the trace that `forward_tables` made.
        nodes: the nodes that `forward_nodes` made.
        device_budget_bytes: device bytes of everything: parameters and optimizer states that are on the device, waiting
            gradients, buffers, inputs, activations, workspace, and what is returned.
        lower_tier: the lower tier, if the plan may use one.
        offloaded_at_rest: storages that are offloaded between training iterations.
        tier_in_use: whether the tier's own device memory is taken already.
        device: name of the device, stated in the summary.
        device_fingerprint: fingerprint of the device, stated in the summary.

    Raises:
        Infeasible: with the smallest budget for which there is a plan.
    """
    planner = _Planner(trace, nodes, lower_tier, tier_in_use, device_budget_bytes)
    offloaded, fits = planner.who_goes(offloaded_at_rest, device_budget_bytes)
    if not fits:
        least = planner.judge(planner.rows(planner.stays(offloaded)), offloaded).outcome
        raise infeasible(device_budget_bytes, least, trace, nodes)
    found = [planner.judge(steps, offloaded) for steps in planner.candidates(offloaded, device_budget_bytes)]
    best = min(found, key=lambda plan: (plan.time_s, plan.outcome.reload_bytes))
    if best.peak_bytes > device_budget_bytes:
        raise AssertionError(f"the referee found a peak of {best.peak_bytes} in a forward")
    whole = planner.judge(planner.rows([]), frozenset())
    request = PlanRequest(device_budget_bytes, device=device, device_fingerprint=device_fingerprint)
    return solved(
        trace, nodes, best, KeepingAll(whole.peak_bytes, whole.time_s), planner.smallest(offloaded_at_rest), request
    )


def _state(offloaded: frozenset[int]) -> TierState:
    return TierState(offloaded=offloaded, copied=offloaded)


class _Planner:
    def __init__(
        self,
        trace: TraceTables,
        nodes: Sequence[ComputeNode],
        lower_tier: LowerTier | None,
        tier_in_use: bool,
        device_budget_bytes: int,
    ) -> None:
        self._nodes = nodes
        self._storages = trace.storages
        self._lower_tier = lower_tier
        self._staged = tier_in_use
        temporary = {s.storage for s in trace.storages if s.role == "temporary"}
        kept = temporary.intersection(trace.values[v].storage for v in left_behind(trace))
        self._program = StepProgram(trace.storages, nodes, keep=frozenset(kept))
        self._size = self._program.nbytes
        self._executions = _labelled(nodes)
        self._level = self._program.profile(self._executions)
        self._referee = Referee(self._program, device_budget_bytes)
        changed = {s for n in nodes for s in n.mutates}
        self._movable = [
            s
            for s in trace.storages
            if lower_tier is not None
            and s.role in ("parameter", "state")
            and s.nbytes >= lower_tier.smallest_bytes
            and s.storage not in changed
        ]
        self._uses: dict[int, list[int]] = defaultdict(list)
        for position, node in enumerate(nodes):
            for storage in {*node.reads, *node.mutates} - temporary:
                self._uses[storage].append(position)

    def need(self, offloaded: frozenset[int]) -> _Bytes:
        """Return the device bytes at each node, with offloaded weights there for the nodes that read them."""
        found: _Bytes = self._level + (
            self._program.base_bytes + self._staging(offloaded) - sum(self._size[s] for s in offloaded)
        )
        for storage in offloaded:
            found[self._uses[storage]] += self._size[storage]
        return found

    def _staging(self, offloaded: frozenset[int]) -> int:
        return (
            self._lower_tier.staging_for(len(offloaded))
            if self._lower_tier is not None and (offloaded or self._staged)
            else 0
        )

    def who_goes(self, offloaded_at_rest: frozenset[int], budget: int) -> tuple[frozenset[int], bool]:
        """Choose what is offloaded at the start and at the end, and say whether that fits.

        It is as little as possible besides `offloaded_at_rest`, yet so much that the next weight can be reloaded while
        one is read.
        """
        offloaded = offloaded_at_rest
        first: frozenset[int] | None = None
        for more in [None, *self._in_order(offloaded_at_rest)]:
            offloaded = offloaded if more is None else offloaded | {more}
            need = int(self.need(offloaded).max(initial=0))
            if need > budget:
                continue
            first = offloaded if first is None else first
            if need + max((self._size[s] for s in offloaded if self._uses[s]), default=0) <= budget:
                return offloaded, True
        return (offloaded, False) if first is None else (first, True)

    def _in_order(self, offloaded_at_rest: frozenset[int]) -> list[int]:
        """Return what could be offloaded besides: optimizer states, then weights; large ones first."""
        here = [s for s in self._movable if s.storage not in offloaded_at_rest]
        return [s.storage for s in sorted(here, key=lambda s: (s.role == "parameter", -s.nbytes, s.storage))]

    def smallest(self, offloaded_at_rest: frozenset[int]) -> int:
        """Return the smallest budget with a plan."""
        offloaded, least = offloaded_at_rest, int(self.need(offloaded_at_rest).max(initial=0))
        for more in self._in_order(offloaded_at_rest):
            offloaded |= {more}
            least = min(least, int(self.need(offloaded).max(initial=0)))
        return least

    def candidates(self, offloaded: frozenset[int], budget: int) -> Iterator[list[Step]]:
        """Yield plans that use the room left: for weights that are read again, and for early reloads of weights."""
        largest = max((self._size[s] for s in offloaded if self._uses[s]), default=0)
        for spared in dict.fromkeys((0, largest, 2 * largest)):
            room: _Bytes = budget - self.need(offloaded)
            stays = self._joined(self.stays(offloaded), room, spared)
            _start_early(stays, self._size, room)
            yield self.rows(stays)

    def stays(self, offloaded: frozenset[int]) -> list[_Stay]:
        """Return one stay for each time that an offloaded weight is read, in that order."""
        found = [_Stay(s, p, p, p) for s in sorted(offloaded) for p in self._uses[s]]
        return sorted(found, key=lambda stay: (stay.first, stay.storage))

    def _joined(self, stays: list[_Stay], room: _Bytes, spared: int) -> list[_Stay]:
        """Join neighbouring stays of a weight, shortest gaps first, where `spared` bytes are left besides."""
        by_storage: dict[int, list[_Stay]] = defaultdict(list)
        for stay in stays:
            by_storage[stay.storage].append(stay)
        pairs = [(b.first - a.last, i, s) for s, own in by_storage.items() for i, (a, b) in enumerate(pairwise(own))]
        joined: set[tuple[int, int]] = set()
        for _, i, storage in sorted(pairs):
            gap = room[by_storage[storage][i].last + 1 : by_storage[storage][i + 1].first]
            if gap.size == 0 or gap.min() >= self._size[storage] + spared:
                gap -= self._size[storage]
                joined.add((storage, i))
        found: list[_Stay] = []
        for storage, own in by_storage.items():
            for i, stay in enumerate(own):
                if (storage, i - 1) in joined:
                    found[-1].last = stay.last
                else:
                    found.append(stay)
        return sorted(found, key=lambda stay: (stay.first, stay.storage))

    def rows(self, stays: Sequence[_Stay]) -> list[Step]:
        """Return the rows of the plan.

        A reload starts before the node of its position; the weight is dropped after its last reader.
        """
        reload: dict[int, list[int]] = defaultdict(list)
        wait: dict[int, list[int]] = defaultdict(list)
        free: dict[int, list[int]] = defaultdict(list)
        for stay in stays:
            reload[stay.start].append(stay.storage)
            wait[stay.first].append(stay.storage)
            free[stay.last].append(stay.storage)
        found: list[Step] = []
        position, label = -1, ""
        for step in self._program.steps(self._executions):
            if step.node >= 0:
                found += [Step(-1, s, label, "free") for s in free[position]]
                position, label = position + 1, step.label
                found += [Step(-1, s, label, "reload") for s in reload[position]]
                found += [Step(-1, s, label, "wait") for s in wait[position]]
            found.append(step)
        return [*found, *(Step(-1, s, label, "free") for s in free[position])]

    def judge(self, steps: Sequence[Step], offloaded: frozenset[int]) -> JudgedPlan:
        """Judge a plan in which `offloaded` is in the lower tier between two forwards."""
        # Training has found room in the lower tier for what is offloaded.
        tier = self._lower_tier.boundless() if self._lower_tier is not None else None
        state, staging_bytes = _state(offloaded), self._staging(offloaded)
        outcome = self._referee.outcome(steps, state, tier, staging_bytes)
        return JudgedPlan(
            method=METHOD, steps=steps, state=state, tier=tier, decision=Decision(METHOD), outcome=outcome, hidden=True
        )


def _labelled(nodes: Sequence[ComputeNode]) -> list[Execution]:
    """Run every node once; nodes that belong to no block go with the block before them."""
    found: list[Execution] = []
    block = SHARED
    for node in nodes:
        block = max(block, node.block)
        found.append(Execution(node.node, f"F{block}" if block != SHARED else "shared"))
    return found


def _start_early(stays: Sequence[_Stay], sizes: Sequence[int], room: _Bytes) -> None:
    """Start each reload as early as there is room, in the order in which weights are needed: they share a queue."""
    earliest = 0
    left: dict[int, int] = defaultdict(int)
    for stay in stays:
        size, start = sizes[stay.storage], stay.first
        while start > max(earliest, left[stay.storage]) and room[start - 1] >= size:
            start -= 1
        room[start : stay.first] -= size
        stay.start = earliest = start
        left[stay.storage] = stay.last + 1
