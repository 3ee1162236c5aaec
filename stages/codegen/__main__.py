"""`python -m stowage.stages.codegen`: the plan as Python, artifacts/codegen/step.py."""

from __future__ import annotations

from stowage.stages.codegen import emit_step, manifest_of
from stowage.stages.ir.command import ARTIFACTS, run_stage
from stowage.stages.ir.graph import ComputeNode
from stowage.stages.ir.plan import PlanRow, PlanSummary
from stowage.stages.ir.table import read_record, read_rows, write_atomically, write_record
from stowage.stages.ir.trace import TraceTables


def main() -> None:
    """Write step.py and its manifest."""
    trace = TraceTables.load(ARTIFACTS / "trace")
    summary = read_record(ARTIFACTS / "solve" / "summary.json", PlanSummary)
    source = emit_step(
        trace,
        read_rows(ARTIFACTS / "partition" / "nodes.parquet", ComputeNode),
        read_rows(ARTIFACTS / "solve" / "plan.parquet", PlanRow),
        summary,
    )
    write_atomically(ARTIFACTS / "codegen" / "step.py", source.encode())
    manifest = manifest_of(source, summary.plan_hash, summary.configuration_hash)
    write_record(ARTIFACTS / "codegen" / "manifest.json", manifest)
    print(f"codegen: {ARTIFACTS / 'codegen' / 'step.py'}, {source.count(chr(10))} lines")


if __name__ == "__main__":
    run_stage(main)
