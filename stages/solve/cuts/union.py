"""Joins several ways to compute a step to one graph, so that what is proven of it holds for every mixture of them."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from stowage.stages.formulations.cuts.step_graph import Charge, StepGraph
from stowage.stages.ir.graph import ComputeNode
from stowage.stages.ir.variant import PLAIN, VariantName
from stowage.stages.rewrite import Way, exchangeable
from stowage.stages.rewrite.identity import CallKey
from stowage.stages.solve.cuts.charges import Charges
from stowage.stages.solve.cuts.naming import NamedWay, Naming, NodeKey, ValueKey


@dataclass(frozen=True)
class Union:
    """The graph of several ways together.

    Every schedule of a way, and of a mixture in which each block is computed in one of them, is a schedule of it that
    takes as long or less, and as much memory or less.

    Attributes:
        graph: what all ways do is there once, and what they do not share is optional.
        numbers: the number of each node in it by its name.
        values: the number of each value in it by its name.
        naming: names the nodes of ways.
        samples: a way that has each node, and the node there.
    """

    graph: StepGraph
    numbers: Mapping[NodeKey, int]
    values: Mapping[ValueKey, int]
    naming: Naming
    samples: Sequence[tuple[NamedWay, ComputeNode]]

    def numbers_of(self, named: NamedWay) -> list[int]:
        """Return for each node of a way or mixture its number here; −1 for one that is not known."""
        return [self.numbers.get(key, -1) for key in self.naming.keys(named)]

    @staticmethod
    def of(ways: Sequence[NamedWay], charges: Charges | None = None) -> Union | None:
        """Join ways; None where what they share is not made in the same order.

        Args:
            ways: the ways, the step as it was recorded first.
            charges: what some calls cost besides time.
        """
        found = _Joining(ways, charges or {})
        order = found.order()
        if order is None:
            return None
        numbers = {key: n for n, key in enumerate(order)}
        return Union(found.graph(order), numbers, found.values, found.naming, [found.sample(key) for key in order])


class _Joining:
    def __init__(self, ways: Sequence[NamedWay], charges: Charges) -> None:
        self._ways = ways
        self._charges = charges
        self.naming = Naming.of(ways)
        self.values = {key: n for n, key in enumerate(dict.fromkeys(key for w in ways for key in w.values))}
        self._keys = {w.way.name: self.naming.keys(w) for w in ways}
        self._versions: dict[NodeKey, list[tuple[NamedWay, ComputeNode]]] = defaultdict(list)
        for way in ways:
            for key, node in zip(self._keys[way.way.name], way.way.nodes, strict=True):
                self._versions[key].append((way, node))
        self._instead: dict[tuple[NodeKey, int], dict[int, None]] = defaultdict(dict)
        self._nodes = {key: self._joined(key, versions) for key, versions in self._versions.items()}
        self._sets = self._mandatory()
        self._draws = self._draws_in_order()

    def _joined(self, key: NodeKey, versions: Sequence[tuple[NamedWay, ComputeNode]]) -> ComputeNode:
        number = self.values
        for way, node in versions:
            for storage, root in self.naming.roots(way, node).items():
                if way.values[storage] != root:
                    self._instead[key, number[root]][number[way.values[storage]]] = None
        way, node = versions[0]
        roots = self.naming.roots(way, node)

        def moved(storages: Sequence[int]) -> tuple[int, ...]:
            return tuple(number[roots.get(s, way.values[s])] for s in storages)

        return replace(
            node,
            reads=moved(node.reads),
            creates=moved(node.creates),
            mutates=moved(node.mutates),
            takes=moved(node.takes),
            time_s=min(n.time_s for _, n in versions),
            workspace_bytes=min(n.workspace_bytes for _, n in versions),
            flagged_bytes=tuple(map(min, zip(*(n.flagged_bytes for _, n in versions)))),
        )

    def _mandatory(self) -> list[tuple[NodeKey, ...]]:
        """Return sets of nodes of which every mixture has one: those with the same call, if no mixture can lose it."""
        holders: dict[CallKey, dict[NodeKey, None]] = defaultdict(dict)
        blocks: dict[CallKey, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
        for way in self._ways:
            for key, node in zip(self._keys[way.way.name], way.way.nodes, strict=True):
                for call in (way.way.names.call[c] for c in node.calls):
                    holders[call][key] = None
                    blocks[call][way.way.name].add(node.block)
        exchanges = list(self._exchanges())
        return list(
            dict.fromkeys(
                tuple(keys)
                for call, keys in holders.items()
                if len(blocks[call]) == len(self._ways) and all(_stays_in(blocks[call], *e) for e in exchanges)
            )
        )

    def _exchanges(self) -> Iterator[tuple[str, Sequence[tuple[str, frozenset[int]]]]]:
        """Yield each way whose blocks are exchanged in mixtures, with the others and those blocks."""
        for first in (w.way for w in self._ways):
            found = VariantName.of(first.name)
            if found.rewrite != PLAIN:
                continue
            others = [w.way for w in self._ways if w.way is not first]
            own = [w for w in others if VariantName.of(w.name).chain == found.chain]
            yield first.name, [(w.name, frozenset(exchangeable(first, w))) for w in own]

    def _draws_in_order(self) -> list[tuple[NodeKey, ...]]:
        """Return the sets of nodes that draw, in order; none where ways differ in it."""
        of_node = {key: found for found in self._sets for key in found if all(self._nodes[k].random for k in found)}
        orders = {
            tuple(of_node.get(k, (k,)) for k, n in zip(self._keys[w.way.name], w.way.nodes, strict=True) if n.random)
            for w in self._ways
        }
        if len(orders) != 1 or any(not _by_blocks(w.way) for w in self._ways):
            return []
        return list(orders.pop())

    def order(self) -> list[NodeKey] | None:
        """Return the nodes in an order in which all makers of what a node reads are before it."""
        makers: dict[int, list[NodeKey]] = defaultdict(list)
        for key, node in self._nodes.items():
            for storage in node.creates:
                makers[storage].append(key)
        before = {
            key: {
                m
                for s in (*n.reads, *n.mutates)
                if s not in n.creates
                for served in (s, *self._instead.get((key, s), ()))
                for m in makers.get(served, ())
            }
            for key, n in self._nodes.items()
        }
        for earlier, later in zip(self._draws, self._draws[1:]):
            for key in later:
                before[key].update(earlier)
        after: dict[NodeKey, list[NodeKey]] = defaultdict(list)
        for key, keys in before.items():
            for other in keys:
                after[other].append(key)
        place = {key: min(n.node / len(w.way.nodes) for w, n in found) for key, found in self._versions.items()}
        missing = {key: len(keys) for key, keys in before.items()}
        ready = [(place[key], number, key) for number, key in enumerate(self._nodes) if not missing[key]]
        rank = {key: number for number, key in enumerate(self._nodes)}
        heapq.heapify(ready)
        found: list[NodeKey] = []
        while ready:
            _, _, key = heapq.heappop(ready)
            found.append(key)
            for other in after[key]:
                missing[other] -= 1
                if not missing[other]:
                    heapq.heappush(ready, (place[other], rank[other], other))
        return found if len(found) == len(self._nodes) else None

    def sample(self, key: NodeKey) -> tuple[NamedWay, ComputeNode]:
        """Return the first way that has a node, and the node there."""
        return self._versions[key][0]

    def _calls_of(self, key: NodeKey) -> Iterator[CallKey]:
        way, node = self.sample(key)
        return (way.way.names.call[c] for c in node.calls)

    def graph(self, order: Sequence[NodeKey]) -> StepGraph:
        """Return the graph."""
        ways, values = self._ways, self.values
        number = {key: n for n, key in enumerate(order)}
        alone = {found[0] for found in self._sets if len(found) == 1}
        nbytes = [1 << 62] * len(values)
        for way in ways:
            for key, size in zip(way.values, way.graph.nbytes, strict=True):
                nbytes[values[key]] = min(nbytes[values[key]], size)

        def shared(storages: Sequence[frozenset[int]]) -> frozenset[int]:
            named = [{values[w.values[s]] for s in own} for w, own in zip(ways, storages, strict=True)]
            return frozenset(set.intersection(*named))

        return StepGraph(
            nodes=[replace(self._nodes[key], node=n) for n, key in enumerate(order)],
            nbytes=nbytes,
            base_bytes=min(w.graph.base_bytes for w in ways),
            waiting=shared([w.graph.waiting for w in ways]),
            stays=shared([w.graph.stays for w in ways]),
            once=frozenset(
                number[key] for key, found in self._versions.items() if all(n.node in w.graph.once for w, n in found)
            ),
            optional=frozenset(number[key] for key in order if key not in alone),
            families=tuple(frozenset(number[k] for k in found) for found in self._sets if len(found) > 1),
            instead={(number[key], value): tuple(others) for (key, value), others in self._instead.items()},
            charges=tuple(
                Charge(frozenset(number[key] for key in order if not calls.isdisjoint(self._calls_of(key))), share)
                for calls, share in self._charges.items()
            ),
            draws=[tuple(number[k] for k in keys) for keys in self._draws],
            least_s=least_s([w.way for w in ways]),
        )


def _stays_in(blocks: Mapping[str, Collection[int]], first: str, others: Sequence[tuple[str, Collection[int]]]) -> bool:
    """Say whether what one way has in a block is there in every mixture, whichever of the others the block is taken of.

    Args:
        blocks: the blocks in which each way has it.
        first: the way whose blocks are exchanged.
        others: the ways that they are exchanged for, each with the blocks that may be.
    """
    return any(all(b in blocks[w] or b not in exchanged for w, exchanged in others) for b in blocks[first])


def _by_blocks(way: Way) -> bool:
    """Say whether a way draws in the order in which mixtures do: outside of the chain first, then block by block."""
    drawing = [(n.phase != "forward", n.block) for n in way.nodes if n.random]
    return drawing == sorted(drawing) and not any(late for late, _ in drawing)


def least_s(ways: Sequence[Way]) -> float:
    """Return the least time in which a way, or a mixture of ways, computes every node once; without collectives."""
    found = [sum(_times(way).values()) for way in ways]
    for first in ways:
        chain = VariantName.of(first.name).chain
        others = [w for w in ways if w is not first and VariantName.of(w.name).chain == chain]
        times = _times(first)
        for way in others:
            own = _times(way)
            for block in exchangeable(first, way):
                times[block] = min(times.get(block, 0.0), own.get(block, 0.0))
        found.append(sum(times.values()))
    return min(found)


def _times(way: Way) -> dict[int, float]:
    found: dict[int, float] = defaultdict(float)
    for node in way.nodes:
        if not node.collective:
            found[node.block] += node.time_s
    return found
