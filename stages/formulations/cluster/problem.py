"""Facts that follow from an H-Graph, shared by its formulations, and a block as an H-Graph.

The graph itself is `ir/h_graph.py`. Budgets: M_peak, bytes in memory at any moment; M_save, bytes in memory when the
loss node runs, what it makes left out (in both, `ir/h_graph.py` says what counts).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from stowage.stages.formulations.block.staged_order import StagedGraph, unit_of
from stowage.stages.ir.block import BlockGraph
from stowage.stages.ir.h_graph import HGraph, HNode, HRun, HStep, HValue


@dataclass(frozen=True)
class ClusterWay:
    """One way to execute a node.

    Attributes:
        option: the option of its cluster; None for the plain way.
        time_s: seconds.
        reads: all values that it reads; ascending.
        steps: as in `HRun`, without those that another one covers.
        phantom_bytes: bytes of the phantom that it leaves (forward) or takes over (backward).
    """

    option: int | None
    time_s: float
    reads: tuple[int, ...]
    steps: tuple[HStep, ...]
    phantom_bytes: int

    def birth(self, value: int) -> int:
        """Return the number of the step from which a value it makes is in memory."""
        return sum(value in step.unborn for step in self.steps)

    def death(self, value: int) -> int:
        """Return the number of the step from which it does not need a value it touches."""
        return len(self.steps) - sum(value in step.released for step in self.steps)


@dataclass(frozen=True)
class HProblem:
    """An H-Graph with the facts that follow from it."""

    graph: HGraph

    @cached_property
    def ways(self) -> tuple[tuple[ClusterWay, ...], ...]:
        """Return the ways of each node, options in order, then the plain way."""
        return tuple(
            tuple(self._way(k, option, run) for option, run in self.graph.runs(k).items())
            for k in range(len(self.graph.nodes))
        )

    def _way(self, k: int, option: int | None, run: HRun) -> ClusterWay:
        reads = tuple(sorted({*self.graph.nodes[k].reads, *run.reads}))
        j = self.cluster_of.get(k)
        phantom = 0 if j is None or option is None else self.graph.clusters[j].options[option].phantom_bytes
        return ClusterWay(option, run.time_s, reads, distinct_steps(run.steps), phantom)

    @cached_property
    def size(self) -> int:
        """Return T, the number of nodes, the loss node included."""
        return len(self.graph.nodes)

    @cached_property
    def nbytes(self) -> tuple[int, ...]:
        """Return the bytes of each value."""
        return tuple(value.nbytes for value in self.graph.values)

    @cached_property
    def cluster_of(self) -> dict[int, int]:
        """Return the cluster of each node that has one."""
        return {k: j for j, c in enumerate(self.graph.clusters) for k in (c.forward, c.backward)}

    @cached_property
    def forward_of(self) -> dict[int, int]:
        """Return the cluster of each forward node."""
        return {c.forward: j for j, c in enumerate(self.graph.clusters)}

    @cached_property
    def backward_of(self) -> dict[int, int]:
        """Return the cluster of each backward node."""
        return {c.backward: j for j, c in enumerate(self.graph.clusters)}

    @cached_property
    def contributors(self) -> tuple[tuple[int, ...], ...]:
        """Return the nodes that contribute to each value, ascending."""
        found: list[list[int]] = [[] for _ in self.graph.values]
        for k, node in enumerate(self.graph.nodes):
            for d in node.makes:
                found[d].append(k)
        return tuple(tuple(nodes) for nodes in found)

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """Return the nodes that read each value in some way, ascending."""
        found: list[list[int]] = [[] for _ in self.graph.values]
        for k, ways in enumerate(self.ways):
            for d in sorted({d for way in ways for d in way.reads}):
                found[d].append(k)
        return tuple(tuple(nodes) for nodes in found)

    def related(self, k: int) -> tuple[int, ...]:
        """Return the values that node k makes, or reads in some way."""
        return tuple(sorted({*self.graph.nodes[k].makes, *(d for way in self.ways[k] for d in way.reads)}))

    def once(self, k: int) -> bool:
        """Say whether node k may run only once."""
        return self.graph.nodes[k].once or k == self.graph.loss

    @cached_property
    def incoming_bytes(self) -> int:
        """Return the bytes of what the loss node makes."""
        return sum(self.nbytes[d] for d in self.graph.nodes[self.graph.loss].makes)

    @cached_property
    def floor_s(self) -> float:
        """Return the time of every node once, each as fast as it can: no schedule is faster."""
        total = 0.0
        for k, ways in enumerate(self.ways):
            if k not in self.cluster_of:
                total += min(way.time_s for way in ways)
        return total + sum(
            min(option.forward.time_s + option.backward.time_s for option in c.options) for c in self.graph.clusters
        )

    def memory_unit(self, budgets: Iterable[int], largest: int) -> int:
        """Return bytes per memory unit: the greatest common divisor of all sizes, or more to keep sums below `largest`.

        Sizes round up to units and budgets down, so what fits in units fits in bytes.
        """
        steps = [step for ways in self.ways for way in ways for step in way.steps]
        sizes = [
            *self.nbytes,
            *(way.phantom_bytes for ways in self.ways for way in ways),
            *(step.internal_bytes for step in steps),
            *(step.phantom_released_bytes for step in steps),
        ]
        phantoms = sum(max(o.phantom_bytes for o in c.options) for c in self.graph.clusters)
        most = sum(self.nbytes) + phantoms + max((step.internal_bytes for step in steps), default=0)
        return unit_of(sizes, max(most, *budgets, 1), largest)


def distinct_steps(steps: tuple[HStep, ...]) -> tuple[HStep, ...]:
    """Leave out steps that another one covers (thesis 3.4.4.1 merges those with equal values).

    A step covers another with no more internal bytes if none of its values are unborn or released that are not so in
    both.
    """

    def covers(one: HStep, two: HStep) -> bool:
        return (
            one.internal_bytes >= two.internal_bytes
            and one.internal_bytes + one.phantom_released_bytes >= two.internal_bytes + two.phantom_released_bytes
            and set(one.unborn) <= set(two.unborn)
            and set(one.released) <= set(two.released)
        )

    kept: list[HStep] = []
    for i, step in enumerate(steps):
        if not any(covers(o, step) and not (i < n and covers(step, o)) for n, o in enumerate(steps) if n != i):
            kept.append(step)
    return tuple(kept)


def flat(block: BlockGraph) -> HGraph:
    """Convert a block to a bottom H-Graph: every node is one operation with one way of one step, its workspace."""
    staged = StagedGraph.of(block)
    return HGraph(
        nodes=tuple(
            HNode(
                node.name,
                tuple(sorted(node.reads)),
                tuple(sorted(node.creates)),
                HRun(node.time_s, (HStep(node.workspace_bytes),)),
                node.once,
            )
            for node in staged.nodes
        ),
        loss=staged.loss,
        values=tuple(HValue(a.name, a.nbytes) for a in block.allocations),
        clusters=(),
        final=tuple(sorted(block.outgoing)),
    )
