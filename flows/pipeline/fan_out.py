"""Solves distinct blocks that the option store lacks as mapped tasks, before the stage that then finds them all.

Plain `dvc repro` gives the same result by itself; tasks show progress, and several blocks are solved at a time, in
threads or processes of this machine or on a Dask cluster. Tasks return options, and the flow alone writes to the store:
a cluster's machines need not see its folder.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from stowage.flows.pipeline.prefect_imports import NO_CACHE, as_completed, task, unmapped
from stowage.flows.pipeline.task_runner import started_runner
from stowage.stages.ir.block import BlockGraph
from stowage.stages.ir.errors import StowageError
from stowage.stages.ir.graph import Block
from stowage.stages.ir.hierarchy import BlockCluster
from stowage.stages.ir.plan import Option
from stowage.stages.ir.table import read_rows
from stowage.stages.options.clusters.regions import clusters_by_block
from stowage.stages.options.generate import options_for_blocks
from stowage.stages.options.parameters import search_of
from stowage.stages.options.store import OptionStore, block_key
from stowage.stages.options.tasks import GridSize
from stowage.stages.settings import load_settings
from stowage.stages.solver.outcome import SolverSettings

Clusters = Mapping[str, Sequence[BlockCluster]]
"""Block hash -> clusters of the block."""

Log = logging.Logger | logging.LoggerAdapter[logging.Logger]


def solve_missing_blocks(root: Path, log: Log) -> int:
    """Solve blocks that the store of `root` lacks; return how many were solved."""
    settings = load_settings(root / "params.yaml").options
    size, limits = search_of(settings)
    store = OptionStore(root / ".stowage" / "options")
    clusters = clusters_by_block(read_rows(root / "artifacts" / "partition" / "clusters.parquet", BlockCluster))
    missing = missing_blocks(root, store, clusters, size, limits)
    if not missing:
        return 0
    cores = settings.workers or os.cpu_count() or 1
    at_once = min(len(missing), cores)
    on_dask = settings.task_runner == "dask"
    where = f"on {settings.dask_scheduler}" if on_dask else f"{at_once} at a time"
    log.info("%d distinct blocks to solve, %s", len(missing), where)
    with started_runner(settings, at_once) as runner:
        futures = runner.map(
            cast(Any, solve_block),
            {
                "name": [block.label for block in missing],
                "graph": [block.graph for block in missing],
                "clusters": [clusters.get(block.block_hash, ()) for block in missing],
                "size": unmapped(size),
                "limits": unmapped(limits),
                # The cores of a cluster's worker are unknown: one process a task, unless `options.workers` says more.
                "workers": unmapped((settings.workers or 1) if on_dask else cores // at_once),
            },
        )
        block_of = dict(zip(futures, missing, strict=True))
        for future in as_completed(list(futures)):
            solved = future.result()
            block = block_of[future]
            expected = key_of(block, clusters, size, limits)
            if solved.key != expected:
                raise StowageError(
                    f"Block {block.label} was solved by another version of Stowage or of its solver: "
                    "install the same packages on the Dask workers as here."
                )
            store.put(expected, list(solved.options))
    return len(missing)


def missing_blocks(
    root: Path, store: OptionStore, clusters: Clusters, size: GridSize, limits: SolverSettings
) -> list[Block]:
    """Return the first of each kind of identical blocks that the store has no options for, in the chain's order."""
    distinct: dict[str, Block] = {}
    for block in read_rows(root / "artifacts" / "partition" / "blocks.parquet", Block):
        distinct.setdefault(block.block_hash, block)
    return [
        block
        for block in distinct.values()
        if store.get(key_of(block, clusters, size, limits), BlockGraph.from_json(block.graph)) is None
    ]


def key_of(block: Block, clusters: Clusters, size: GridSize, limits: SolverSettings) -> str:
    """Return the key of a block's options in a store."""
    return block_key(BlockGraph.from_json(block.graph), size, limits, clusters.get(block.block_hash, ()))


@dataclass(frozen=True)
class SolvedBlock:
    """Options of a block, and their key in a store, as computed by the code that made them."""

    key: str
    options: tuple[Option, ...]


@task(name="block", task_run_name="block {name}", cache_policy=NO_CACHE)
def solve_block(
    name: str, graph: str, clusters: Sequence[BlockCluster], size: GridSize, limits: SolverSettings, workers: int
) -> SolvedBlock:
    """Solve one block, in `workers` processes; `name` is for people."""
    block = BlockGraph.from_json(graph)
    found = options_for_blocks([block], None, size=size, settings=limits, workers=workers, clusters=clusters)
    (options,) = found.values()
    return SolvedBlock(block_key(block, size, limits, clusters), tuple(options))
