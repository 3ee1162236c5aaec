"""Makes the chains of a step: folds calls, cuts blocks, and partitions large blocks into clusters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stowage.stages.ir.costs import Cost
from stowage.stages.ir.defaults import MAX_BLOCKS, MAX_EXACT_NODES
from stowage.stages.ir.graph import Block, ComputeNode
from stowage.stages.ir.hierarchy import BlockCluster
from stowage.stages.ir.trace import TraceTables
from stowage.stages.ir.variant import LONG_LIVED, NO_LONG_LIVED, ChainName
from stowage.stages.partition.alike import like
from stowage.stages.partition.blocks import partition
from stowage.stages.partition.clusters.block import block_clusters
from stowage.stages.partition.clusters.partition import Limits
from stowage.stages.partition.fold import fold
from stowage.stages.rewrite import is_asked

SMALLEST_BLOCK = 4
"""Least number of forward nodes of a block: smaller neighbours are merged."""


def make_blocks(
    trace: TraceTables, costs: Mapping[str, Cost], *, max_blocks: int = MAX_BLOCKS
) -> tuple[list[ComputeNode], list[Block]]:
    """Fold calls into compute nodes and cut them into the chain of blocks, `max_blocks` at most.

    Raises:
        TableError: a call of the trace has no cost.
    """
    return _cut(trace, fold(trace, costs).nodes, max_blocks, None)


def _cut(
    trace: TraceTables, folded: Sequence[ComputeNode], max_blocks: int, long_lived_from: int | None
) -> tuple[list[ComputeNode], list[Block]]:
    smallest = SMALLEST_BLOCK
    while True:
        nodes, blocks = partition(trace, folded, smallest_block=smallest, long_lived_from=long_lived_from)
        if len(blocks) <= max_blocks:
            return nodes, blocks
        smallest *= 2


HOLD_FROM = (128, 64, 32, 16)
"""Numbers of nodes between the making of a value and its last use from which it counts as long-lived."""

HUGE = 1000
"""Compute nodes of a block above which even greedy rules are slow: it is used only if there is no other chain."""


@dataclass(frozen=True)
class Partitioned:
    """A partitioned step: its nodes and blocks, and the clusters of blocks to be solved by parts."""

    nodes: list[ComputeNode]
    blocks: list[Block]
    clusters: list[BlockCluster]


def make_chains(
    trace: TraceTables,
    costs: Mapping[str, Cost],
    *,
    max_blocks: int = MAX_BLOCKS,
    max_exact_nodes: int = MAX_EXACT_NODES,
    limits: Limits | None = None,
) -> dict[ChainName, Partitioned]:
    """Make the chain of blocks, and the chain around long-lived values where that helps, by their names.

    The second is made where the first has a large block that keeping long-lived values makes smaller. Neither is better
    for every budget: what is kept cannot be made again; but where keeping makes a huge block small, the second is the
    only chain. Blocks that do not become smaller are partitioned into clusters. A block is large with more than
    `max_exact_nodes` nodes.

    Raises:
        TableError: a call of the trace has no cost.
    """
    folded = fold(trace, costs).nodes
    plain = _cut(trace, folded, max_blocks, None)
    largest = before = _largest(plain[1])
    if largest <= max_exact_nodes:
        return {NO_LONG_LIVED: Partitioned(*plain, [])}
    long_lived: tuple[list[ComputeNode], list[Block]] | None = None
    for long_lived_from in HOLD_FROM:
        nodes, blocks = _cut(trace, folded, max_blocks, long_lived_from)
        if _largest(blocks) < largest:
            largest, long_lived = _largest(blocks), (nodes, blocks)
        if largest <= max_exact_nodes:
            break
    if long_lived is None:
        return {NO_LONG_LIVED: Partitioned(*plain, _clusters(trace, *plain, max_exact_nodes, limits))}
    around: dict[ChainName, Partitioned] = {
        LONG_LIVED: Partitioned(*long_lived, _clusters(trace, *long_lived, max_exact_nodes, limits))
    }
    return (
        around if before > HUGE and largest <= max_exact_nodes else {NO_LONG_LIVED: Partitioned(*plain, []), **around}
    )


def make_variants(
    traces: Mapping[str, TraceTables],
    costs: Mapping[str, Cost],
    *,
    max_blocks: int = MAX_BLOCKS,
    max_exact_nodes: int = MAX_EXACT_NODES,
    limits: Limits | None = None,
) -> dict[str, dict[ChainName, Partitioned]]:
    """Make the chains of a step and of its rewrites, by the rewrites' names.

    Those that keep values in fewer bits are cut like the step as it was recorded.

    Args:
        traces: the step as it was recorded first, then as rewrites have it.
        costs: the cost of every call.
        max_blocks: see `make_chains`.
        max_exact_nodes: see `make_chains`.
        limits: see `make_chains`.
    """
    found: dict[str, dict[ChainName, Partitioned]] = {}
    plain: TraceTables | None = None
    chains: dict[ChainName, Partitioned] = {}
    for name, trace in traces.items():
        if plain is not None and is_asked(name):
            made = _made_like(plain, chains, trace, costs, max_exact_nodes, limits)
        else:
            made = make_chains(trace, costs, max_blocks=max_blocks, max_exact_nodes=max_exact_nodes, limits=limits)
        if plain is None:
            plain, chains = trace, made
        found[name] = made
    return found


def _made_like(
    plain: TraceTables,
    chains: Mapping[ChainName, Partitioned],
    trace: TraceTables,
    costs: Mapping[str, Cost],
    max_exact_nodes: int,
    limits: Limits | None,
) -> dict[ChainName, Partitioned]:
    """Make the chains of a rewrite, cut where those of the step as it was recorded are, so that blocks correspond."""
    folded = fold(trace, costs).nodes
    found: dict[ChainName, Partitioned] = {}
    for name, chain in chains.items():
        nodes, blocks = partition(trace, folded, like=like(plain, chain.nodes, chain.blocks, trace))
        found[name] = Partitioned(nodes, blocks, _clusters(trace, nodes, blocks, max_exact_nodes, limits))
    return found


def _clusters(
    trace: TraceTables, nodes: list[ComputeNode], blocks: list[Block], max_exact_nodes: int, limits: Limits | None
) -> list[BlockCluster]:
    large = [b for b in blocks if len(b.nodes) > max_exact_nodes]
    return block_clusters(trace, nodes, large, limits or Limits()) if large else []


def _largest(blocks: list[Block]) -> int:
    """Return the number of compute nodes of the largest block."""
    return max(len(b.nodes) for b in blocks)
