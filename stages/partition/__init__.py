"""Compute nodes, the chain of blocks, and which blocks are identical."""

from __future__ import annotations

from collections.abc import Mapping

from stowage.stages.ir.costs import Cost
from stowage.stages.ir.graph import Block, ComputeNode
from stowage.stages.ir.trace import TraceTables
from stowage.stages.partition.blocks import partition
from stowage.stages.partition.fold import fold

__all__ = ["make_blocks"]


def make_blocks(
    trace: TraceTables, costs: Mapping[str, Cost], *, smallest_block: int = 4
) -> tuple[list[ComputeNode], list[Block]]:
    """Fold calls into compute nodes and cut them into the chain of blocks.

    Raises:
        TableError: a call of the trace has no cost.
    """
    return partition(trace, fold(trace, costs).nodes, smallest_block=smallest_block)
