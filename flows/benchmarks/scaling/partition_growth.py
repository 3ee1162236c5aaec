"""Measures how H-Partition grows with the size of the graph: 10^3 to 10^6 nodes, on one core."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from stowage.flows.benchmarks.scaling.partition_figure import partition_figure
from stowage.flows.benchmarks.scaling.synthetic_graphs import SHAPES
from stowage.stages.ir.files import write_atomically
from stowage.stages.ir.table import write_rows
from stowage.stages.partition.clusters.partition import Limits, h_partition, partition_score
from stowage.stages.report.figures import render
from stowage.stages.report.frames import frame_of

SIZES = (1_000, 3_000, 10_000, 30_000, 100_000, 300_000, 1_000_000)


@dataclass(frozen=True)
class PartitionGrowthRow:
    """One row: the partition of a graph.

    Attributes:
        shape: name in `SHAPES`.
        nodes: nodes of the graph.
        seconds: processor time, from the graph to the rows of its hierarchy.
        clusters: number of clusters.
        distinct: number of different clusters.
        levels: level of the top.
        largest: members of the largest cluster.
        top: members of the top.
        score: equation 3.1, summed over the clusters.
    """

    shape: str
    nodes: int
    seconds: float
    clusters: int
    distinct: int
    levels: int
    largest: int
    top: int
    score: float


def measure(shape: str, size: int, limits: Limits | None = None) -> PartitionGrowthRow:
    """Partition one graph."""
    graph = SHAPES[shape](size)
    gc.collect()
    before = time.process_time()
    hierarchy = h_partition(graph, limits)
    seconds = time.process_time() - before
    inner = hierarchy.clusters[:-1]
    return PartitionGrowthRow(
        shape=shape,
        nodes=len(graph.nodes),
        seconds=seconds,
        clusters=len(hierarchy.clusters),
        distinct=len({c.cluster_hash for c in hierarchy.clusters}),
        levels=hierarchy.top.level,
        largest=max((len(c.children) for c in inner), default=0),
        top=len(hierarchy.top.children),
        score=partition_score(hierarchy),
    )


def partition_growth(
    sizes: Sequence[int] = SIZES,
    shapes: Sequence[str] = tuple(SHAPES),
    say: Callable[[str], None] = lambda text: None,
) -> Iterator[PartitionGrowthRow]:
    """Partition graphs of every size and shape, small ones first."""
    for size in sizes:
        for shape in shapes:
            row = measure(shape, size)
            say(
                f"{shape}, {row.nodes:,} nodes: {row.seconds:.2f} s, {row.clusters:,} clusters ({row.distinct:,} "
                f"distinct) on {row.levels} levels, {row.top} members at the top"
            )
            yield row


def run_partition_growth(folder: Path, say: Callable[[str], None], sizes: Sequence[int] = SIZES) -> str:
    """Measure, write `partition.parquet` and `partition.png` into `folder`, and say what the largest graphs took."""
    rows = list(partition_growth(sizes, say=say))
    write_rows(folder / "partition.parquet", PartitionGrowthRow, rows)
    write_atomically(folder / "partition.png", picture(rows))
    largest = (
        frame_of(PartitionGrowthRow, rows)
        .group_by("shape", maintain_order=True)
        .agg(pl.col("seconds", "nodes").sort_by("nodes").last())
    )
    return "\n".join(
        f"{shape}: {seconds:.1f} s for {nodes:,} nodes, {seconds / nodes * 1e6:.0f} µs a node"
        for shape, seconds, nodes in largest.iter_rows()
    )


def picture(rows: Sequence[PartitionGrowthRow]) -> bytes:
    """Draw the plot as PNG."""
    lines: dict[str, list[tuple[int, float]]] = {}
    frame = frame_of(PartitionGrowthRow, rows).sort("nodes", maintain_order=True)
    for shape, nodes, seconds in frame.select("shape", "nodes", "seconds").iter_rows():
        lines.setdefault(shape, []).append((nodes, seconds))
    return render(lambda: partition_figure(lines))[1]
