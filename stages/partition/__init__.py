"""Compute nodes, the chain of blocks, and which blocks are identical."""

from stowage.stages.partition.chains import Partitioned, make_blocks, make_chains
from stowage.stages.partition.clusters.partition import Limits

__all__ = ["Limits", "Partitioned", "make_blocks", "make_chains"]
