"""Writes the report of the plan in this project, and of its training as far as there is one.

python -m stowage.flows.report
python -m stowage.flows.report .stowage/runs/9a3d540852bf --out plan.html

`train` writes one too, in artifacts/train; this needs no training, only a plan.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stowage.flows.pipeline.command import one_sentence, run_command
from stowage.flows.pipeline.project import find_root
from stowage.stages.ir.curve import CurvePoint
from stowage.stages.ir.graph import Block, ComputeNode
from stowage.stages.ir.plan import Option, PlanRow, PlanSummary
from stowage.stages.ir.run import MemorySample, StepRecord
from stowage.stages.ir.table import read_record, read_rows
from stowage.stages.ir.trace import TraceTables
from stowage.stages.rewrite import stored_variant

if TYPE_CHECKING:
    from stowage.stages.report import ReportTables


def tables_of(artifacts: Path) -> ReportTables:
    """Read the tables that the report is made of.

    Args:
        artifacts: a folder that is laid out as `artifacts/` is; what training writes may be absent.

    Raises:
        TableError: a table is missing, damaged, or not ours.
    """
    summary = read_record(artifacts / "solve" / "summary.json", PlanSummary)

    def rows(path: str, row_type: type[Any], *, needed: bool = True) -> list[Any]:
        return read_rows(artifacts / path, row_type) if needed or (artifacts / path).is_file() else []

    nodes, blocks = rows("partition/nodes.parquet", ComputeNode), rows("partition/blocks.parquet", Block)
    step = stored_variant(TraceTables.load(artifacts / "trace"), nodes, blocks, summary.variant)
    from stowage.stages.report import ReportTables  # imports matplotlib, which takes a second

    return ReportTables(
        storages=step.trace.storages,
        nodes=list(step.nodes),
        blocks=list(step.blocks),
        plan_rows=rows("solve/plan.parquet", PlanRow),
        summary=summary,
        options=rows("options/options.parquet", Option, needed=False),
        steps=rows("train/steps.parquet", StepRecord, needed=False),
        memory=rows("train/memory.parquet", MemorySample, needed=False),
        curve=rows("solve/curve.parquet", CurvePoint, needed=False),
        calls=step.trace.calls,
        paths={"plan": artifacts / "solve" / "plan.parquet", "step.py": artifacts / "codegen" / "step.py"},
        title=step.trace.meta.model,
    )


def main(
    folder: Annotated[Path | None, typer.Argument(help="A folder of artifacts; the project's own by default.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="The page, or a folder for it; artifacts/report/report.html by default.")
    ] = None,
) -> None:
    """Write the report of the plan as one HTML page, without training."""
    with one_sentence():
        artifacts = folder or find_root() / "artifacts"
        tables = tables_of(artifacts)
        from stowage.stages.report import write_page

        page = out or artifacts / "report"
        typer.echo(write_page(page if page.suffix == ".html" else page / "report.html", tables))


if __name__ == "__main__":
    run_command(main)
