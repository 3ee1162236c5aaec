"""`python -m stowage.stages.partition`: artifacts/trace + artifacts/profile → artifacts/partition."""

from __future__ import annotations

from dataclasses import replace

from stowage.stages.ir.command import ARTIFACTS, run_stage
from stowage.stages.ir.costs import Cost
from stowage.stages.ir.graph import Block, ComputeNode
from stowage.stages.ir.table import read_rows, write_rows
from stowage.stages.ir.trace import TraceTables
from stowage.stages.partition import make_blocks
from stowage.stages.rewrite import variants_of
from stowage.stages.settings import load_settings


def main() -> None:
    """Fold, cut, and name identical blocks."""
    settings = load_settings().partition
    trace = TraceTables.load(ARTIFACTS / "trace")
    costs = {c.signature: c for c in read_rows(ARTIFACTS / "profile" / "costs.parquet", Cost)}
    nodes: list[ComputeNode] = []
    blocks: list[Block] = []
    for name, variant in variants_of(trace).items():
        some_nodes, some_blocks = make_blocks(variant, costs, max_blocks=settings.max_blocks)
        nodes += [replace(n, variant=name) for n in some_nodes]
        blocks += [replace(b, variant=name) for b in some_blocks]
    write_rows(ARTIFACTS / "partition" / "nodes.parquet", ComputeNode, nodes)
    write_rows(ARTIFACTS / "partition" / "blocks.parquet", Block, blocks)
    distinct = len({b.block_hash for b in blocks})
    print(f"partition: {len(nodes)} compute nodes in {len(blocks)} blocks (all variants), {distinct} of them distinct")


if __name__ == "__main__":
    run_stage(main)
