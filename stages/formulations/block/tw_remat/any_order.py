"""Costs of any order of executions, staged or not, and orders with fewer executions in the same memory.

An order is a list of staged nodes, each as often as it runs. Every read uses the last copy before it; a copy is freed
after its last use.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from stowage.stages.formulations.block.greedy.lazy import Candidate
from stowage.stages.formulations.block.staged_order import StagedGraph, Timeline, cost_of, timeline
from stowage.stages.ir.executions import first_runs, needed_runs

# Rounds of `retain`; each leaves out at most one execution of a node.
_ROUNDS = 8


def candidate_of_order(graph: StagedGraph, order: Sequence[int]) -> Candidate:
    """Compute the cost of running nodes in this order; stages of its executions are positions in the order."""
    executions: dict[int, list[int]] = {}
    for position, k in enumerate(order):
        executions.setdefault(k, []).append(position)
    line = timeline(graph, executions)
    return Candidate({}, executions, line, cost_of(graph, line))


def order_of(candidate: Candidate) -> list[int]:
    """Return the nodes in the order of their executions."""
    return [k for _, k in candidate.line.events]


def useful(graph: StagedGraph, order: Sequence[int]) -> list[int]:
    """Leave out executions whose results nobody reads before they are made again; first executions stay."""
    wanted, nodes = set(graph.block.outgoing), graph.nodes
    kept = needed_runs(order, first_runs(order), wanted, lambda k: nodes[k].creates, lambda k: nodes[k].reads)
    return [order[position] for position in kept]


def retain(graph: StagedGraph, order: Sequence[int], peak_bytes: int, save_bytes: int) -> list[int]:
    """Leave out executions while both budgets hold.

    Those go first that take the most time for the memory it costs to keep the copy before.

    Args:
        graph: the block.
        order: an order within both budgets.
        peak_bytes: M_peak.
        save_bytes: M_save.
    """
    current = list(order)
    for _ in range(_ROUNDS):
        line = candidate_of_order(graph, current).line
        released = _left_out(graph, line, peak_bytes, save_bytes)
        if not released:
            break
        current = useful(graph, [k for position, k in enumerate(current) if position not in released])
    return current


@dataclass(frozen=True)
class _Repeat:
    """An execution that is not the first of its node, and the copies that leaving it out would keep.

    Attributes:
        position: its position in the order.
        node: staged node.
        holds: the copies that would be kept: (position after which each is freed now, bytes), if it is read later.
    """

    position: int
    node: int
    holds: tuple[tuple[int, int], ...]

    def price(self, time_s: float) -> float:
        """Return the seconds saved for each byte kept."""
        return time_s / max(1, sum(nbytes for _, nbytes in self.holds))


def _left_out(graph: StagedGraph, line: Timeline, peak_bytes: int, save_bytes: int) -> set[int]:
    """Return positions that can be left out together."""
    room = _room(graph, line, peak_bytes, save_bytes)
    released: dict[int, int] = {}
    for repeat in sorted(_repeats(graph, line), key=lambda r: (-r.price(graph.nodes[r.node].time_s), r.position)):
        if repeat.node in released:
            continue
        taken = []
        for freed, nbytes in repeat.holds:
            stretch = room[freed + 1 : repeat.position]
            if stretch.size and int(stretch.min()) < nbytes:
                break
            stretch -= nbytes
            taken.append((stretch, nbytes))
        else:
            released[repeat.node] = repeat.position
            continue
        for stretch, nbytes in taken:
            stretch += nbytes
    return set(released.values())


def _room(
    graph: StagedGraph, line: Timeline, peak_bytes: int, save_bytes: int
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return the bytes that are free while each execution runs; at the loss, within M_save too."""
    room = np.empty(len(line.events), dtype=np.int64)
    used = 0
    for position, ((_, k), freed) in enumerate(zip(line.events, line.freed, strict=True)):
        before = used
        used += sum(graph.nbytes[a] for a in graph.nodes[k].creates)
        room[position] = peak_bytes - used - graph.nodes[k].workspace_bytes
        if k == graph.loss:
            room[position] = min(room[position], save_bytes - before)
        used -= sum(graph.nbytes[a] for a in freed)
    return room


def _repeats(graph: StagedGraph, line: Timeline) -> Iterator[_Repeat]:
    """Find the executions that are not the first of their node."""
    frees: dict[int, list[int]] = {}
    for position, freed in enumerate(line.freed):
        for a in freed:
            frees.setdefault(a, []).append(position)
    seen: set[int] = set()
    for position, (_, k) in enumerate(line.events):
        if k in seen:
            holds = []
            for a in graph.nodes[k].creates:
                times = frees[a]
                following = bisect_left(times, position)
                if following == len(times) or times[following] > position:
                    holds.append((times[following - 1], graph.nbytes[a]))
            yield _Repeat(position, k, tuple(holds))
        seen.add(k)
