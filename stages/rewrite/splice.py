"""Splices the nodes and blocks of a step in which some blocks are rewritten and the others are as recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

from stowage.stages.ir.block import BlockGraph
from stowage.stages.ir.graph import SHARED, Block, ComputeNode
from stowage.stages.ir.trace import TraceTables
from stowage.stages.rewrite.identity import Names, Translation

Boundary = tuple[object, ...]

T = TypeVar("T")


@dataclass(frozen=True)
class Way:
    """A way to compute all blocks: a whole trace, with its nodes and blocks.

    Attributes:
        name: name of the variant.
        trace, nodes, blocks: its tables, as the earlier stages wrote them.
    """

    name: str
    trace: TraceTables
    nodes: Sequence[ComputeNode]
    blocks: Sequence[Block]

    @cached_property
    def names(self) -> Names:
        """Return the names of the trace's calls and storages."""
        return Names(self.trace)

    @cached_property
    def members(self) -> Mapping[int, list[ComputeNode]]:
        """Return the nodes of each block, in order."""
        found: dict[int, list[ComputeNode]] = {}
        for node in self.nodes:
            found.setdefault(node.block, []).append(node)
        return found

    @cached_property
    def _kept(self) -> dict[object, Any]:
        return {}

    def once(self, key: object, make: Callable[[], T]) -> T:
        """Return what `make` returned when it was first asked for under this key."""
        if key not in self._kept:
            self._kept[key] = make()
        found: T = self._kept[key]
        return found

    def boundary(self, block: int) -> Boundary:
        """Return what other blocks see of a block, by name: it must be equal for blocks of two ways to be exchanged."""
        return self.once(("boundary", block), lambda: self._boundary(block))

    def _boundary(self, block: int) -> Boundary:
        found = self.blocks[block]
        graph = BlockGraph.from_json(found.graph)

        def seen(allocations: Iterable[int]) -> tuple[tuple[str, int], ...]:
            return tuple((self.names.storage[found.storages[a]], graph.allocations[a].nbytes) for a in allocations)

        return (
            seen(graph.output),
            sorted(seen(graph.incoming)),
            sorted(seen(graph.outgoing)),
            found.resident_bytes,
            sorted(self.names.storage[s] for s in found.consumed),
            sorted(self.names.storage[s] for s in self.read_elsewhere(block)),
        )

    def read_elsewhere(self, block: int) -> set[int]:
        """Return storages that a block reads and that nodes outside of it make."""
        read = {s for n in self.members.get(block, []) for s in n.reads}
        return {s for s in read if block not in self._made_in.get(s, (block,))}

    @cached_property
    def _made_in(self) -> Mapping[int, set[int]]:
        """Return the blocks whose nodes make each storage."""
        found: dict[int, set[int]] = {}
        for node in self.nodes:
            for storage in node.creates:
                found.setdefault(storage, set()).add(node.block)
        return found

    @cached_property
    def shared(self) -> tuple[object, ...]:
        """Return the nodes outside of the chain, by name."""
        return tuple(tuple(self.names.call[c] for c in n.calls) for n in self.members.get(SHARED, []))


def exchangeable(first: Way, other: Way) -> tuple[int, ...]:
    """Return the blocks that `other` computes in another way than `first`, and that may be taken from either.

    There are none where the two are cut differently, or differ outside of the chain.
    """
    if len(first.blocks) != len(other.blocks) or first.shared != other.shared:
        return ()
    pairs = list(zip(first.blocks, other.blocks, strict=True))
    if any(first.boundary(b) != other.boundary(b) for b in range(len(pairs))):
        return ()
    return tuple(b for b, (mine, theirs) in enumerate(pairs) if mine.block_hash != theirs.block_hash)


def spliced(
    mixed: TraceTables, ways: Sequence[Way], taken: Sequence[int]
) -> tuple[list[ComputeNode], list[Block]] | None:
    """Make the nodes and blocks of a mixed trace.

    Args:
        mixed: the trace in which each block is computed as its way does.
        ways: the ways; the first is the trace as it was recorded.
        taken: position of each block's way.

    Returns:
        The result of folding and cutting the mixed trace; None where a way's block is not found in it.
    """
    names = Names(mixed)
    translations = [Translation(way.names, names) for way in ways]
    ordered: list[tuple[int, ComputeNode]] = []

    def take(block: int, way: int, phases: tuple[str, ...]) -> None:
        ordered.extend((way, n) for n in ways[way].members.get(block, []) if n.phase in phases)

    late = ("backward", "update")
    shared = ways[0].members.get(SHARED, [])
    ordered += [(0, n) for n in shared if n.phase != "update"]
    for block, way in enumerate(taken):
        take(block, way, ("forward",))
    for block in reversed(range(len(taken))):
        take(block, taken[block], late)
    ordered += [(0, n) for n in shared if n.phase == "update"]

    nodes: list[ComputeNode] = []
    number: dict[tuple[int, int], int] = {}
    for position, (way, node) in enumerate(ordered):
        moved = _node(node, translations[way])
        if moved is None:
            return None
        number[way, node.node] = position
        nodes.append(replace(moved, node=position))
    blocks: list[Block] = []
    for block, way in enumerate(taken):
        found = ways[way].blocks[block]
        storages, consumed = translations[way].storages(found.storages), translations[way].storages(found.consumed)
        if storages is None or consumed is None:
            return None
        own = tuple(number[way, n] for n in found.nodes)
        blocks.append(replace(found, nodes=own, storages=storages, consumed=tuple(sorted(consumed))))
    return nodes, blocks


def _node(node: ComputeNode, translation: Translation) -> ComputeNode | None:
    calls = translation.calls(node.calls)
    found = [translation.storages(s) for s in (node.reads, node.creates, node.mutates, node.takes)]
    if calls is None or None in found:
        return None
    reads, creates, mutates, takes = (s or () for s in found)
    return replace(
        node,
        calls=calls,
        reads=tuple(sorted(reads)),
        creates=tuple(sorted(creates)),
        mutates=tuple(sorted(mutates)),
        takes=takes,
    )
