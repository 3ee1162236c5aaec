"""Names the values and nodes of several ways to compute a step, so that what they share is found."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from stowage.stages.formulations.cuts.step_graph import StepGraph
from stowage.stages.ir.graph import ComputeNode
from stowage.stages.rewrite import Way
from stowage.stages.rewrite.identity import CallKey

ValueKey = tuple[str, str]
NodeKey = tuple[object, ...]
Place = tuple[CallKey, int]
"""An argument of a call."""


class NamedWay:
    """Names the values of a way so that ways can be compared.

    Attributes:
        way: the way.
        graph: its graph.
        values: the name of each storage.
    """

    def __init__(self, way: Way) -> None:
        self.way = way
        self.graph = StepGraph.of(way.trace, way.nodes)
        self.values = _values(way)
        self._storage_of = [v.storage for v in way.trace.values]

    def places(self, call: int) -> Iterator[tuple[Place, int]]:
        """Yield each argument of a call with its storage."""
        name = self.way.names.call[call]
        for position, value in enumerate(self.way.trace.calls[call].reads):
            yield (name, position), self._storage_of[value]


def _values(way: Way) -> list[ValueKey]:
    """Name each storage by what the node that makes it leaves in it: a way may put something else there before."""
    found: list[ValueKey] = [(s.role, s.name) for s in way.trace.storages]
    storage_of = [v.storage for v in way.trace.values]
    for node in way.nodes:
        made = set(node.creates)
        for call in (way.trace.calls[c] for c in node.calls):
            for value in call.returns:
                if value >= 0 and storage_of[value] in made:
                    found[storage_of[value]] = ("made", way.trace.values[value].name)
    return found


@dataclass(frozen=True)
class Naming:
    """Names the nodes of ways so that ways can be compared.

    Attributes:
        read: what the first way that has a call reads at each of its places.
    """

    read: Mapping[Place, ValueKey]

    @staticmethod
    def of(ways: Iterable[NamedWay]) -> Naming:
        """Take the ways, the most usual first."""
        read: dict[Place, ValueKey] = {}
        for way in ways:
            for call in range(len(way.way.trace.calls)):
                for place, storage in way.places(call):
                    read.setdefault(place, way.values[storage])
        return Naming(read)

    def roots(self, way: NamedWay, node: ComputeNode) -> dict[int, ValueKey]:
        """Return for what a node reads the name of what is read in its place in the first way that has the call."""
        found: dict[int, ValueKey] = {}
        for call in node.calls:
            for place, storage in way.places(call):
                if storage not in node.creates:
                    found.setdefault(storage, self.read.get(place, way.values[storage]))
        return found

    def keys(self, way: NamedWay) -> list[NodeKey]:
        """Return the name of each node of a way: its calls, and what it makes, and reads in the first way."""
        return [self._key(way, n) for n in way.way.nodes]

    def _key(self, way: NamedWay, node: ComputeNode) -> NodeKey:
        roots = self.roots(way, node)

        def named(storages: Sequence[int]) -> tuple[ValueKey, ...]:
            return tuple(sorted(roots.get(s, way.values[s]) for s in storages))

        calls = tuple(way.way.names.call[c] for c in node.calls)
        parts = (node.reads, node.creates, node.mutates, node.takes)
        return (node.phase, node.collective, node.random, calls, *map(named, parts))
