"""Finds under which units' training a node runs in whatever plan there is of a step that freezes.

A plan's rows have guards (`stages.freezing.guards`), which depend on what it makes again. Of a node that runs several
times all guards together have at least what those that read its results need: each of them reads from one of the runs.
And every run has the guard of something that reads it, so that it runs under as many masks as one that trains.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from stowage.stages.freezing.outputs import SHAPED, copied_guards
from stowage.stages.freezing.owners import Owners
from stowage.stages.freezing.times import chance
from stowage.stages.ir.freezable import Freezable
from stowage.stages.ir.graph import ComputeNode
from stowage.stages.ir.trace import TraceTables
from stowage.stages.ir.units import ALWAYS, joined
from stowage.stages.solve.cuts.naming import NamedWay
from stowage.stages.solve.cuts.union import Union


@dataclass(frozen=True)
class Need:
    """What a node needs a value for.

    Attributes:
        node: the node.
        guard: under something of it the value is read for certain, in one run of the node or another.
    """

    node: int
    guard: int


class CertainGuards:
    """Holds what is certain of each node and value of a union.

    Attributes:
        first: for each node the share of masks under which it runs at least once.
        again: for each node the share of masks that each further run adds at least.
        needs: for each value what needs it.
        guards: for each node the guard of all of its runs together, that is certain.
        anyway: nodes whose first run is made under every mask, whatever reads it.
        kept: for each value that the step leaves behind, the guard under which it must exist.
        gradients: bytes of gradients that are in memory throughout, if what they are of trains, by guard.
    """

    def __init__(self, union: Union, freezable: Freezable) -> None:
        """Go through the nodes from the last to the first."""
        graph = union.graph
        self._count, self._active = len(freezable.units), freezable.active
        owners = {way.way.name: Owners(way.way.trace, way.way.nodes, freezable.units) for way, _ in union.samples}
        named = {way.way.name: way for way, _ in union.samples}
        owners = {name: Owners(way.way.trace, way.way.nodes, freezable.units) for name, way in named.items()}
        wholes = {name: copied_guards(way.way.trace, freezable.units) for name, way in named.items()}
        way = union.samples[0][0]
        kept = {union.values[way.values[s]]: guard for s, guard in owners[way.way.name].kept.items()}
        self.kept = {value: guard for value, guard in kept.items() if value in graph.stays}
        self.gradients = Counter[int]()
        for storage, guard in owners[way.way.name].waiting().items():
            if storage not in way.graph.waiting:
                self.gradients[guard] += way.graph.nbytes[storage]
        self.needs: dict[int, list[Need]] = {s: [] for s in graph.readers}
        self.guards, self.anyway = [0] * len(graph.nodes), set[int]()
        self.first, self.again = [0.0] * len(graph.nodes), [0.0] * len(graph.nodes)
        least = {value: self.share(guard) for value, guard in self.kept.items()}
        """Of each value, the share of masks under which any one of its readers may read it at least."""
        for node in reversed(graph.nodes):
            way, sample = union.samples[node.node]
            mine = owners[way.way.name]
            guard = joined(mine.guard(sample), *(self._certain(s) for s in node.creates))
            unread = not any(graph.readers[s] or s in self.kept for s in node.creates)
            if node.phase == "forward" and (unread or node.mutates or node.random):
                guard = ALWAYS
                self.anyway.add(node.node)
            self.guards[node.node] = guard
            shares = [least[s] for s in node.creates if s in least]
            run = min(shares) if shares else self.share(guard)
            self.first[node.node] = self.share(guard)
            self.again[node.node] = run if guard & ALWAYS else max(0.0, min(run, 2 * run - self.first[node.node]))
            special = dict(self._special(union, way, sample, mine))
            for call in sample.calls:
                if (copied := wholes[way.way.name].get(call)) is not None:
                    special[union.values[way.values[copied.source]]] = copied.guard, -1
            for value in graph.reads[node.node]:
                served = graph.serving(node.node, value)
                if value in special:
                    own_guard, output = special[value]
                    contributed = self._certain(output) if output >= 0 else own_guard
                    share = least.get(output, 0.0) if output >= 0 else self.share(own_guard)
                else:
                    contributed, share = guard, run
                for s in served:
                    least[s] = min(least.get(s, 1.0), share)
                if node.node not in graph.optional and served == (value,):
                    self.needs[value].append(Need(node.node, contributed))

    def share(self, guard: int) -> float:
        """Return the share of masks that have something of a guard."""
        return chance(guard, self._count, self._active)

    def _certain(self, value: int) -> int:
        return joined(self.kept.get(value, 0), *(need.guard for need in self.needs.get(value, ())))

    def _special(
        self, union: Union, way: NamedWay, node: ComputeNode, owners: Owners
    ) -> Iterator[tuple[int, tuple[int, int]]]:
        """Yield values that a node may do without: with their own guard, or with the result that they are for."""
        for storage, guard in owners.lacking(node).items():
            yield union.values[way.values[storage]], (guard, -1)
        for argument, output in _shaped(way.way.trace, node):
            yield union.values[way.values[argument]], (0, union.values[way.values[output]] if output >= 0 else -1)


def _shaped(trace: TraceTables, node: ComputeNode) -> Iterator[tuple[int, int]]:
    """Yield storages of which a kernel needs the contents for one result alone, with that result's; −1 for none."""
    for call in (trace.calls[c] for c in node.calls):
        if call.target in SHAPED:
            position, output = SHAPED[call.target]
            value = json.loads(call.arguments)["args"][position]["value"]
            returned = call.returns[output]
            yield trace.values[value].storage, trace.values[returned].storage if returned >= 0 else -1
