"""Distinct blocks that the option store lacks, solved as mapped tasks before the stage that then finds them all.

Plain `dvc repro` gives the same result by itself; tasks show progress, and several blocks are solved at a time.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from stowage.flows._prefect import NO_CACHE, ThreadPoolTaskRunner, task, unmapped
from stowage.stages.ir.block import BlockGraph
from stowage.stages.ir.graph import Block
from stowage.stages.ir.table import read_rows
from stowage.stages.options.generate import options_for_blocks
from stowage.stages.options.store import OptionStore, option_key
from stowage.stages.options.tasks import GridSize
from stowage.stages.settings import OptionsSettings, load_settings
from stowage.stages.solver.outcome import SolverSettings

Log = logging.Logger | logging.LoggerAdapter[logging.Logger]


def solve_missing_blocks(root: Path, log: Log) -> int:
    """Solve what the store of `root` lacks; the number of blocks that were solved."""
    settings = load_settings(root / "params.yaml").options
    size, limits = search_of(settings)
    store = OptionStore(root / ".stowage" / "options")
    missing = missing_blocks(root, store, size, limits)
    if not missing:
        return 0
    cores = settings.workers or os.cpu_count() or 1
    at_once = min(len(missing), cores)
    log.info("%d distinct blocks to solve, %d at a time", len(missing), at_once)
    runner: ThreadPoolTaskRunner[int] = ThreadPoolTaskRunner(max_workers=at_once)
    with runner:
        futures = runner.map(
            solve_block,
            {
                "name": [block.label for block in missing],
                "graph": [block.graph for block in missing],
                "folder": unmapped(store.folder),
                "size": unmapped(size),
                "limits": unmapped(limits),
                "workers": unmapped(cores // at_once),
            },
        )
        futures.result()
    return len(missing)


def missing_blocks(root: Path, store: OptionStore, size: GridSize, limits: SolverSettings) -> list[Block]:
    """The first of each kind of identical blocks that the store has no options for, in the chain's order."""
    distinct: dict[str, Block] = {}
    for block in read_rows(root / "artifacts" / "partition" / "blocks.parquet", Block):
        distinct.setdefault(block.block_hash, block)
    return [
        block
        for name, block in distinct.items()
        if store.get(option_key(name, size, limits), BlockGraph.from_json(block.graph)) is None
    ]


def search_of(settings: OptionsSettings) -> tuple[GridSize, SolverSettings]:
    """What `stages/options` makes of its parameters."""
    size = GridSize(
        peak_budgets=settings.peak_budgets,
        save_budgets=settings.save_budgets,
        max_exact_nodes=settings.max_exact_nodes,
    )
    return size, SolverSettings(time_limit_s=settings.time_limit_s, seed=settings.seed)


@task(name="block", task_run_name="block {name}", cache_policy=NO_CACHE)
def solve_block(name: str, graph: str, folder: Path, size: GridSize, limits: SolverSettings, workers: int) -> int:
    """Solve one block into the store; the number of its options."""
    found = options_for_blocks(
        [BlockGraph.from_json(graph)], OptionStore(folder), size=size, settings=limits, workers=workers
    )
    return sum(len(options) for options in found.values())
