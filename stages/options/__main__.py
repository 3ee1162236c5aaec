"""`python -m stowage.stages.options`: schedules of every distinct block → artifacts/options."""

from __future__ import annotations

import os

from rich.progress import Progress

from stowage.stages.ir.block import BlockGraph
from stowage.stages.ir.command import ARTIFACTS, STORE, run_stage
from stowage.stages.ir.graph import Block
from stowage.stages.ir.hierarchy import BlockCluster
from stowage.stages.ir.plan import Option
from stowage.stages.ir.table import read_rows, write_rows
from stowage.stages.options.generate import options_for_blocks
from stowage.stages.options.parameters import search_of
from stowage.stages.options.store import OptionStore
from stowage.stages.settings import load_settings


def main() -> None:
    """Solve the distinct blocks that the store lacks."""
    settings = load_settings().options
    size, limits = search_of(settings)
    blocks = read_rows(ARTIFACTS / "partition" / "blocks.parquet", Block)
    with Progress() as bar:
        task = bar.add_task("options", total=None)
        found = options_for_blocks(
            [BlockGraph.from_json(b.graph) for b in blocks],
            OptionStore(STORE / "options"),
            size=size,
            settings=limits,
            workers=settings.workers or os.cpu_count() or 1,
            clusters=read_rows(ARTIFACTS / "partition" / "clusters.parquet", BlockCluster),
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    rows = [option for name in sorted(found) for option in found[name]]
    write_rows(ARTIFACTS / "options" / "options.parquet", Option, rows)
    proven = sum(o.status == "optimal" for o in rows)
    print(f"options: {len(rows)} schedules of {len(found)} distinct blocks, {proven} proven optimal for their budgets")


if __name__ == "__main__":
    run_stage(main)
