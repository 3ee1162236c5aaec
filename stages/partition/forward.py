"""Makes compute nodes of a forward alone, in eager's order, with the blocks they belong to, for people."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import replace

from stowage.stages.ir.costs import Cost
from stowage.stages.ir.graph import SHARED, ComputeNode
from stowage.stages.ir.trace import TraceTables
from stowage.stages.partition.chain import find_chain
from stowage.stages.partition.fold import fold


def forward_nodes(trace: TraceTables, costs: Mapping[str, Cost], *, smallest_block: int = 4) -> list[ComputeNode]:
    """Fold the calls of a forward into compute nodes and number their blocks as those of the training step are found.

    Nothing runs again in a forward alone, so the blocks control nothing: they are the steps that people read.

    Raises:
        TableError: a call of the trace has no cost.
    """
    nodes = fold(trace, costs).nodes
    chain = find_chain(
        nodes,
        frozenset(s.storage for s in trace.storages if s.role == "parameter"),
        frozenset(s.storage for s in trace.storages if s.role == "input"),
        frozenset(),
        [s.nbytes for s in trace.storages],
        smallest_block=smallest_block,
    )
    borders = [cut.forward_position for cut in chain.cuts]
    block_of = {n.node: bisect_left(borders, e) for n, e in zip(chain.forward, chain.effective, strict=True)}
    return [replace(n, block=block_of.get(n.node, SHARED)) for n in nodes]
