"""Finds in a rewrite of a step where the step as it was recorded is cut into blocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from stowage.stages.ir.block import BlockGraph
from stowage.stages.ir.graph import SHARED, Block, ComputeNode
from stowage.stages.ir.trace import TraceTables, base_values
from stowage.stages.partition.chain import Like


def like(plain: TraceTables, nodes: Sequence[ComputeNode], blocks: Sequence[Block], trace: TraceTables) -> Like:
    """Return the borders and long-lived values of a cutting, as storages of a rewrite.

    Args:
        plain: the step as it was recorded.
        nodes: its nodes.
        blocks: its blocks.
        trace: the rewrite; values have the same names in both.
    """
    borders = {b.storages[i] for b in blocks[:-1] for i in BlockGraph.from_json(b.graph).output}
    known = {s for b in blocks for s in b.storages}
    made = {s for n in nodes if n.block != SHARED and n.phase == "forward" for s in n.creates}
    first = base_values(plain)
    there = {trace.values[v].name: s for s, v in base_values(trace).items()}

    def moved(storages: Iterable[int]) -> frozenset[int]:
        names = [plain.values[first[s]].name for s in storages if s in first]
        return frozenset(there[name] for name in names if name in there)

    return Like(moved(borders), moved(made - known))
