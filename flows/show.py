"""Prints the table of the last run in this project: `python -m stowage.flows.show`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from stowage.flows.pipeline.command import one_sentence, run_command
from stowage.flows.pipeline.project import find_root
from stowage.stages.ir.plan import PlanSummary
from stowage.stages.ir.run import MemorySample, StepRecord
from stowage.stages.ir.table import read_record, read_rows
from stowage.stages.report import summary_table


def main(
    folder: Annotated[Path | None, typer.Argument(help="A folder of artifacts; the project's own by default.")] = None,
) -> None:
    """Print what the plan promised and what the run measured."""
    with one_sentence():
        artifacts = folder or find_root() / "artifacts"
        summary = read_record(artifacts / "solve" / "summary.json", PlanSummary)
        trained = (artifacts / "train" / "steps.parquet").is_file()
        steps = read_rows(artifacts / "train" / "steps.parquet", StepRecord) if trained else []
        memory = read_rows(artifacts / "train" / "memory.parquet", MemorySample) if trained else []
        Console().print(summary_table(summary, steps, memory))


if __name__ == "__main__":
    run_command(main)
