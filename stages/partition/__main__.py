"""`python -m stowage.stages.partition`: artifacts/trace + artifacts/profile → artifacts/partition."""

from __future__ import annotations

from dataclasses import replace

from stowage.stages.ir.command import ARTIFACTS, run_stage
from stowage.stages.ir.costs import Cost
from stowage.stages.ir.graph import Block, ComputeNode
from stowage.stages.ir.hierarchy import BlockCluster
from stowage.stages.ir.lossy import ERRORS, GradientError
from stowage.stages.ir.table import read_rows, write_rows
from stowage.stages.ir.trace import TraceTables
from stowage.stages.ir.variant import VariantName
from stowage.stages.partition import make_variants
from stowage.stages.partition.clusters.partition import Limits
from stowage.stages.rewrite import rewritten, variants_of
from stowage.stages.rewrite.lossy import choices
from stowage.stages.settings import load_settings


def main() -> None:
    """Fold calls, cut the chain of blocks, and name identical blocks."""
    everything = load_settings()
    settings = everything.partition
    how = {"max_blocks": settings.max_blocks, "max_exact_nodes": everything.options.max_exact_nodes}
    trace = TraceTables.load(ARTIFACTS / "trace")
    costs = {c.signature: c for c in read_rows(ARTIFACTS / "profile" / "costs.parquet", Cost)}
    nodes: list[ComputeNode] = []
    blocks: list[Block] = []
    clusters: list[BlockCluster] = []
    limits = Limits(settings.top_size, settings.cluster_size, settings.alpha)
    traces = variants_of(trace)
    lossy = everything.lossy.leave
    if lossy is not None:
        errors = read_rows(ARTIFACTS / "trace" / ERRORS, GradientError)
        # What is frozen, if anything, is for `solve` to say.
        traces |= {name: rewritten(trace, name) for name in choices(trace, costs, errors, lossy, frozen=1.0)}
    for rewrite, made_of in make_variants(traces, costs, **how, limits=limits).items():
        for chain, made in made_of.items():
            name = VariantName(rewrite, chain).text
            nodes += [replace(n, variant=name) for n in made.nodes]
            blocks += [replace(b, variant=name) for b in made.blocks]
            clusters += [replace(c, variant=name) for c in made.clusters]
    write_rows(ARTIFACTS / "partition" / "nodes.parquet", ComputeNode, nodes)
    write_rows(ARTIFACTS / "partition" / "blocks.parquet", Block, blocks)
    write_rows(ARTIFACTS / "partition" / "clusters.parquet", BlockCluster, clusters)
    distinct = len({b.block_hash for b in blocks})
    print(f"partition: {len(nodes)} compute nodes in {len(blocks)} blocks (all variants), {distinct} of them distinct")
    if clusters:
        print(f"partition: {len(clusters)} clusters in {len({c.block_hash for c in clusters})} large blocks")


if __name__ == "__main__":
    run_stage(main)
