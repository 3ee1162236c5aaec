"""How H-Partition grows with the size of the graph: 10^3 to 10^6 nodes, on one core."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from stowage.flows.benchmarks.scaling.partition_figure import partition_figure
from stowage.flows.benchmarks.scaling.synthetic_graphs import SHAPES
from stowage.stages.ir.files import write_atomically
from stowage.stages.ir.table import write_rows
from stowage.stages.partition.clusters.partition import Limits, h_partition, partition_score
from stowage.stages.report.figures import render

SIZES = (1_000, 3_000, 10_000, 30_000, 100_000, 300_000, 1_000_000)


@dataclass(frozen=True)
class PartitionGrowthRow:
    """One partition.

    Attributes:
        shape: name in `SHAPES`.
        nodes: of the graph.
        seconds: of processor time, from the graph to the rows of its hierarchy.
        clusters, distinct: how many, and how many different ones.
        levels: of the top.
        largest, top: members of the largest cluster and of the top.
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
    below = hierarchy.clusters[:-1]
    return PartitionGrowthRow(
        shape=shape,
        nodes=len(graph.nodes),
        seconds=seconds,
        clusters=len(hierarchy.clusters),
        distinct=len({c.cluster_hash for c in hierarchy.clusters}),
        levels=hierarchy.top.level,
        largest=max((len(c.children) for c in below), default=0),
        top=len(hierarchy.top.children),
        score=partition_score(hierarchy),
    )


def partition_growth(
    sizes: Sequence[int] = SIZES,
    shapes: Sequence[str] = tuple(SHAPES),
    say: Callable[[str], None] = lambda text: None,
) -> Iterator[PartitionGrowthRow]:
    """Every combination, small graphs first."""
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
    return "\n".join(
        f"{r.shape}: {r.seconds:.1f} s for {r.nodes:,} nodes, {r.seconds / r.nodes * 1e6:.0f} µs a node"
        for r in rows[-len(SHAPES) :]
    )


def picture(rows: Sequence[PartitionGrowthRow]) -> bytes:
    """The plot as PNG."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for r in sorted(rows, key=lambda r: r.nodes):
        lines.setdefault(r.shape, []).append((r.nodes, r.seconds))
    return render(lambda: partition_figure(lines))[1]
