"""The staged order of Checkmate (thesis 2.1.1, 2.4.1), shared by the formulations that schedule inside one block.

Nodes are numbered in topological order with the virtual loss node between forward and backward: it takes no time,
reads the block's output and creates the incoming gradient. Stage t runs from the end of the first execution of node
t−1 to the end of the first execution of node t; in it every node k ≤ t may run once, in ascending order. An execution
is therefore a pair (t, k), and a schedule is the set of executions: when each allocation can be freed follows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from stowage.stages.ir.block import Action, BlockGraph, BlockNode, BlockSchedule

Executions = Mapping[int, Sequence[int]]
"""Stages in which each staged node runs, ascending; the first is the node's own number."""


@dataclass(frozen=True)
class StagedGraph:
    """A block with its loss node.

    Attributes:
        block: the block itself.
        nodes: the block's nodes with the loss node at position `loss`.
        loss: position of the loss node.
    """

    block: BlockGraph
    nodes: tuple[BlockNode, ...]
    loss: int

    @staticmethod
    def of(block: BlockGraph) -> StagedGraph:
        """Insert the loss node."""
        loss = BlockNode("loss", 0.0, 0, tuple(sorted(block.output)), tuple(sorted(block.incoming)), once=True)
        count = block.forward_count
        return StagedGraph(block, (*block.nodes[:count], loss, *block.nodes[count:]), count)

    @cached_property
    def creator(self) -> dict[int, int]:
        """Return the staged node that creates each allocation."""
        return {a: k for k, node in enumerate(self.nodes) for a in node.creates}

    @cached_property
    def readers(self) -> dict[int, tuple[int, ...]]:
        """Return the staged nodes that read each allocation, ascending."""
        found: dict[int, list[int]] = {a: [] for a in range(len(self.block.allocations))}
        for k, node in enumerate(self.nodes):
            for a in node.reads:
                found[a].append(k)
        return {a: tuple(readers) for a, readers in found.items()}

    @cached_property
    def nbytes(self) -> tuple[int, ...]:
        """Return the bytes of each allocation."""
        return tuple(a.nbytes for a in self.block.allocations)

    @property
    def incoming_bytes(self) -> int:
        """Return the bytes of the gradient that arrives at the loss."""
        return sum(self.nbytes[a] for a in self.block.incoming)

    def phantoms(self, k: int) -> tuple[int, ...]:
        """Return what forward node `k` saves only for backward: created by it and read by backward nodes alone."""
        if k >= self.loss:
            return ()
        kept = set(self.block.output) | set(self.block.outgoing)
        return tuple(
            a
            for a in self.nodes[k].creates
            if a not in kept and self.readers[a] and all(r > self.loss for r in self.readers[a])
        )

    def action(self, k: int) -> Action:
        """Return the row that computes staged node `k` (never the loss)."""
        return Action("compute", k if k < self.loss else k - 1)


@dataclass(frozen=True)
class StagedCost:
    """Cost of a set of executions, counted as the thesis does: seconds and bytes."""

    time_s: float
    save_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int

    @property
    def peak_bytes(self) -> int:
        """Return the highest memory of both parts."""
        return max(self.forward_peak_bytes, self.backward_peak_bytes)

    def within(self, peak_bytes: int, save_bytes: int) -> bool:
        """Say whether both budgets hold."""
        return self.peak_bytes <= peak_bytes and self.save_bytes <= save_bytes


@dataclass(frozen=True)
class Timeline:
    """Executions in order, with what is freed right after each.

    Attributes:
        events: (stage, node), ascending.
        freed: for each event, allocations whose last use it is, ascending.
    """

    events: tuple[tuple[int, int], ...]
    freed: tuple[tuple[int, ...], ...]


def run_once(graph: StagedGraph) -> dict[int, list[int]]:
    """Run every node exactly once: nothing is recomputed."""
    return {k: [k] for k in range(len(graph.nodes))}


def timeline(graph: StagedGraph, executions: Executions) -> Timeline:
    """Order the executions and free every copy of an allocation right after its last use."""
    events = tuple(sorted((t, k) for k, stages in executions.items() for t in stages))
    last_use: dict[int, int] = {}
    freed: list[list[int]] = [[] for _ in events]
    for position, (_, k) in enumerate(events):
        for a in graph.nodes[k].reads:
            last_use[a] = position
        for a in graph.nodes[k].creates:
            if a in last_use:
                freed[last_use[a]].append(a)
            last_use[a] = position
    kept = set(graph.block.outgoing)
    for a, position in last_use.items():
        if a not in kept:
            freed[position].append(a)
    return Timeline(events, tuple(tuple(sorted(f)) for f in freed))


def cost_of(graph: StagedGraph, line: Timeline) -> StagedCost:
    """Compute time and memory of a timeline."""
    nbytes, nodes = graph.nbytes, graph.nodes
    time_s, used, save, peaks, part = 0.0, 0, 0, [0, 0], 0
    for (_, k), freed in zip(line.events, line.freed, strict=True):
        node = nodes[k]
        if k == graph.loss:
            save, part = used, 1
        for a in node.creates:
            used += nbytes[a]
        peaks[part] = max(peaks[part], used + node.workspace_bytes)
        time_s += node.time_s
        for a in freed:
            used -= nbytes[a]
    return StagedCost(time_s, save, peaks[0], peaks[1])


def schedule_of(graph: StagedGraph, line: Timeline) -> BlockSchedule:
    """Convert a timeline to rows; what the loss frees is freed first in backward."""
    parts: tuple[list[Action], list[Action]] = ([], [])
    part = 0
    for (_, k), freed in zip(line.events, line.freed, strict=True):
        if k == graph.loss:
            part = 1
        else:
            parts[part].append(graph.action(k))
        parts[part].extend(Action("free", a) for a in freed)
    return BlockSchedule(tuple(parts[0]), tuple(parts[1]))


def memory_unit(graph: StagedGraph, budgets: Iterable[int], largest: int) -> int:
    """Return bytes per unit of memory: the greatest common divisor of all sizes, or more to stay below `largest`.

    Sizes are rounded up to units and budgets down, so that a schedule within the rounded budget is within the true one.
    """
    sizes = [*graph.nbytes, *(node.workspace_bytes for node in graph.nodes)]
    most = sum(graph.nbytes) + max((n.workspace_bytes for n in graph.nodes), default=0)
    return unit_of(sizes, max(most, *budgets, 1), largest)


def unit_of(sizes: Iterable[int], most: int, largest: int) -> int:
    """Return bytes per memory unit: the greatest common divisor of `sizes`, or more to keep `most` below `largest`."""
    return max(math.gcd(*sizes) or 1, -(-most // largest))


def units(nbytes: int, unit: int) -> int:
    """Convert bytes to units, rounded up."""
    return -(-nbytes // unit)
