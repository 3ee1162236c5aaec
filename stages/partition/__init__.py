"""Compute nodes, the chain of blocks, and which blocks are identical."""

from __future__ import annotations

from collections.abc import Mapping

from stowage.stages.ir.costs import Cost
from stowage.stages.ir.graph import Block, ComputeNode
from stowage.stages.ir.trace import TraceTables
from stowage.stages.partition.blocks import partition
from stowage.stages.partition.fold import fold

__all__ = ["make_blocks"]

SMALLEST_BLOCK = 4
"""Forward nodes of a block, at least: smaller neighbours are merged."""


def make_blocks(
    trace: TraceTables, costs: Mapping[str, Cost], *, max_blocks: int = 200
) -> tuple[list[ComputeNode], list[Block]]:
    """Fold calls into compute nodes and cut them into the chain of blocks, `max_blocks` at most.

    Raises:
        TableError: a call of the trace has no cost.
    """
    folded = fold(trace, costs).nodes
    smallest = SMALLEST_BLOCK
    while True:
        nodes, blocks = partition(trace, folded, smallest_block=smallest)
        if len(blocks) <= max_blocks:
            return nodes, blocks
        smallest *= 2
