"""Describes a training step as the cut formulation sees it: nodes, what they read and make, and who precedes whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from stowage.stages.ir.graph import ComputeNode
from stowage.stages.ir.once import once_by_trace
from stowage.stages.ir.trace import TraceTables
from stowage.stages.ir.updates import left_behind, taken_gradients

Bits = int
"""Node numbers as a set: node n is in it if bit n is one."""


@dataclass(frozen=True)
class StepGraph:
    """The nodes of one step, and the values that a schedule may keep or drop.

    Attributes:
        nodes: in a topological order, each at the position of its number.
        nbytes: bytes of each storage.
        base_bytes: in memory throughout: what is there before and after the step.
        waiting: gradients that wait when the step starts, and are freed after their last reader.
        stays: values that the step leaves in memory.
        once: nodes that no schedule may run again.
    """

    nodes: Sequence[ComputeNode]
    nbytes: Sequence[int]
    base_bytes: int
    waiting: frozenset[int]
    stays: frozenset[int]
    once: frozenset[int]

    @staticmethod
    def of(trace: TraceTables, nodes: Sequence[ComputeNode]) -> StepGraph:
        """Make the graph of a trace and its nodes."""
        storage_of = [v.storage for v in trace.values]
        gradients = frozenset(s.storage for s in trace.storages if s.role == "gradient")
        waiting = gradients.intersection(storage_of[v] for v in taken_gradients(trace.calls))
        lasting = (s.nbytes for s in trace.storages if s.role != "temporary" and s.storage not in waiting)
        made = {s for n in nodes for s in n.creates}
        return StepGraph(
            nodes=nodes,
            nbytes=[s.nbytes for s in trace.storages],
            base_bytes=sum(lasting),
            waiting=waiting,
            stays=frozenset(made.intersection(storage_of[v] for v in left_behind(trace))),
            once=once_by_trace(trace, nodes),
        )

    @cached_property
    def maker(self) -> dict[int, int]:
        """Return the node that makes each value; a gradient that waits has none."""
        return {s: n.node for n in self.nodes for s in n.creates}

    @cached_property
    def reads(self) -> list[tuple[int, ...]]:
        """Return the values that each node needs in memory, besides those that it makes."""
        values = self.maker.keys() | self.waiting
        return [
            tuple(s for s in dict.fromkeys((*n.reads, *n.mutates)) if s in values and s not in n.creates)
            for n in self.nodes
        ]

    @cached_property
    def readers(self) -> dict[int, list[int]]:
        """Return the nodes that read each value."""
        found: dict[int, list[int]] = {s: [] for s in (*self.maker, *self.waiting)}
        for node, reads in enumerate(self.reads):
            for storage in reads:
                found[storage].append(node)
        return found

    @cached_property
    def ancestors(self) -> list[Bits]:
        """Return the nodes whose first run precedes each node's in every schedule.

        These are the makers of what it reads, and for nodes that draw random numbers those that draw before.
        """
        before: list[list[int]] = [[self.maker[s] for s in reads if s in self.maker] for reads in self.reads]
        for first, second in pairwise(n.node for n in self.nodes if n.random):
            before[second].append(first)
        found: list[Bits] = []
        for direct in before:
            own = 0
            for node in direct:
                own |= found[node] | 1 << node
            found.append(own)
        return found

    def precedes(self, first: int, second: int) -> bool:
        """Return whether a node is a strict ancestor of another."""
        return bool(self.ancestors[second] >> first & 1)

    def taken_bytes(self, node: int) -> int:
        """Return the most bytes that a sum may save by being written over a summand."""
        return max((self.nbytes[s] for s in self.nodes[node].takes), default=0)
