"""Describes a training step as the cut formulation sees it: nodes, what they read and make, and who precedes whom.

A step may have parts that can be computed in several ways: then some nodes are optional, a value may have several
makers, and of a family of nodes at least one runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce
from itertools import pairwise
from operator import and_

from stowage.stages.ir.graph import ComputeNode
from stowage.stages.ir.once import once_by_trace
from stowage.stages.ir.trace import TraceTables
from stowage.stages.ir.updates import left_behind, taken_gradients

Bits = int
"""Node numbers as a set: node n is in it if bit n is one."""


@dataclass(frozen=True)
class Charge:
    """Says what it costs to run any of some nodes, however often: a share of what all may cost together."""

    nodes: frozenset[int]
    share: float


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
        after: for each node that uses what lasts longer than the step (a weight, a buffer, a gradient that waits), the
            nodes before it that it comes after: one of the two changes what the other uses.
        optional: nodes that some ways to compute the step do without.
        instead: what serves a node in the place of a value that it reads, by (node, value).
        families: of each of these sets of optional nodes at least one runs, in whatever way the step is computed.
        charges: what running some optional nodes costs besides time; shares of all that run add up to 1 at most.
        draws: nodes that draw random numbers in the order of their first runs, with one another those of which one
            draws; by default every node that does, by itself.
        least_s: the least time in which any way computes, without collectives; by default that of all nodes.
    """

    nodes: Sequence[ComputeNode]
    nbytes: Sequence[int]
    base_bytes: int
    waiting: frozenset[int]
    stays: frozenset[int]
    once: frozenset[int]
    after: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    optional: frozenset[int] = frozenset()
    families: tuple[frozenset[int], ...] = ()
    instead: Mapping[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    charges: tuple[Charge, ...] = ()
    draws: Sequence[tuple[int, ...]] | None = None
    least_s: float | None = None

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
            after=after_changes(nodes, {s.storage for s in trace.storages if s.role != "temporary"}),
        )

    @cached_property
    def makers(self) -> dict[int, tuple[int, ...]]:
        """Return the nodes that make each value, one of which is enough; a gradient that waits has none."""
        found: dict[int, tuple[int, ...]] = {}
        for node in self.nodes:
            for storage in node.creates:
                found[storage] = (*found.get(storage, ()), node.node)
        return found

    @cached_property
    def maker(self) -> dict[int, int]:
        """Return the node that makes each value, of a step that is computed in one way."""
        return {s: makers[0] for s, makers in self.makers.items()}

    @cached_property
    def once_s(self) -> float:
        """Return the time below which no schedule can be: every node once, collectives beside computing.

        Of collectives that some ways do without none counts.
        """
        computing_s = self.least_s
        if computing_s is None:
            computing_s = sum(n.time_s for n in self.nodes if not n.collective)
        certain_s = sum(n.time_s for n in self.nodes if n.collective and n.node not in self.optional)
        return both_lanes_s(computing_s, certain_s)

    @cached_property
    def reads(self) -> list[tuple[int, ...]]:
        """Return the values that each node needs in memory, besides those that it makes.

        It needs none where something that is there throughout serves instead.
        """
        values = self.makers.keys() | self.waiting
        return [
            tuple(
                s
                for s in dict.fromkeys((*n.reads, *n.mutates))
                if s not in n.creates and values.issuperset(self.serving(n.node, s))
            )
            for n in self.nodes
        ]

    @cached_property
    def readers(self) -> dict[int, list[int]]:
        """Return the nodes that read each value."""
        found: dict[int, list[int]] = {s: [] for s in (*self.makers, *self.waiting)}
        for node, reads in enumerate(self.reads):
            for storage in (s for read in reads for s in self.serving(node, read)):
                found[storage].append(node)
        return found

    def serving(self, node: int, value: int) -> tuple[int, ...]:
        """Return the values of which a node needs one where it reads a value: that one, and what serves instead."""
        return (value, *self.instead.get((node, value), ()))

    @cached_property
    def ancestors(self) -> list[Bits]:
        """Return what precedes each node's first run in every schedule.

        These are the makers of what it reads, what it comes `after`, and for nodes that draw random numbers those that
        draw before. Where one of several makers is enough, what precedes them all counts: bit `len(nodes) + f` says
        that a node of family f has run.
        """
        before = {n: earlier for earlier, later in pairwise(self.draws_in_order) for n in later}
        found: list[Bits] = []
        for node, reads in enumerate(self.reads):
            own = self._precede_all(before.get(node, ()), found)
            for earlier in self.after.get(node, ()):
                own |= self._precede_all([earlier], found)
            for served in (self.serving(node, s) for s in reads):
                if all(s in self.makers for s in served):
                    own |= self._precede_all([m for s in served for m in self.makers[s]], found)
            found.append(own)
        return found

    def _precede_all(self, nodes: Sequence[int], ancestors: Sequence[Bits]) -> Bits:
        """Return what has run after any one of some nodes has."""
        every = [ancestors[n] | 1 << n | self._bits_of_families.get(n, 0) for n in nodes]
        return reduce(and_, every) if every else 0

    @cached_property
    def _bits_of_families(self) -> dict[int, Bits]:
        found: dict[int, Bits] = {}
        for bit, family in enumerate(self.families, start=len(self.nodes)):
            for node in family:
                found[node] = found.get(node, 0) | 1 << bit
        return found

    @cached_property
    def draws_in_order(self) -> list[tuple[int, ...]]:
        """Return the nodes that draw random numbers in their order, those of which one draws together."""
        return list(self.draws) if self.draws is not None else [(n.node,) for n in self.nodes if n.random]

    def precedes(self, first: int, second: int) -> bool:
        """Return whether a node, or some node of a family by its bit, runs before another in every schedule."""
        return bool(self.ancestors[second] >> first & 1)

    def taken_bytes(self, node: int) -> int:
        """Return the most bytes that a sum may save by being written over a summand."""
        return max((self.nbytes[s] for read in self.nodes[node].takes for s in self.serving(node, read)), default=0)


def after_changes(nodes: Sequence[ComputeNode], lasting: set[int]) -> dict[int, tuple[int, ...]]:
    """Return what each node comes after because one of the two changes what the other uses and what is not made anew.

    Args:
        nodes: in their order.
        lasting: storages that are there before the step, and after it or until they are used up.
    """
    found: dict[int, set[int]] = {}
    readers: dict[int, list[int]] = {}
    changed: dict[int, int] = {}
    for node in nodes:
        for storage in lasting.intersection((*node.reads, *node.mutates)):
            changes = storage in node.mutates
            earlier = {changed[storage]} if storage in changed else set()
            if changes:
                earlier |= set(readers.pop(storage, ()))
                changed[storage] = node.node
            else:
                readers.setdefault(storage, []).append(node.node)
            if earlier:
                found.setdefault(node.node, set()).update(earlier)
    return {node: tuple(sorted(earlier)) for node, earlier in found.items()}


def both_lanes_s(computing_s: float, collectives_s: float) -> float:
    """Return the least time of a step that computes and exchanges for so long.

    A collective needs its lane, also where computing waits for it.
    """
    return max(computing_s, collectives_s)
