"""Writes the plan as Python to artifacts/codegen/step.py: `python -m stowage.stages.codegen`."""

from __future__ import annotations

from stowage.stages.codegen import emit_step, manifest_of
from stowage.stages.freezing.choice import freezable_of
from stowage.stages.freezing.copies import nodes_with_copies
from stowage.stages.freezing.stored import check_plan
from stowage.stages.ir.command import ARTIFACTS, run_stage
from stowage.stages.ir.errors import IllegalPlanError, TableError
from stowage.stages.ir.files import write_atomically
from stowage.stages.ir.freezable import FreezeChoice
from stowage.stages.ir.graph import Block, ComputeNode
from stowage.stages.ir.plan import PlanRow, PlanSummary, Slot
from stowage.stages.ir.table import read_record, read_rows, write_record
from stowage.stages.ir.trace import TraceTables
from stowage.stages.rewrite import stored_variant


def main() -> None:
    """Write step.py and its manifest."""
    summary = read_record(ARTIFACTS / "solve" / "summary.json", PlanSummary)
    nodes = read_rows(ARTIFACTS / "partition" / "nodes.parquet", ComputeNode)
    blocks = read_rows(ARTIFACTS / "partition" / "blocks.parquet", Block)
    recorded = TraceTables.load(ARTIFACTS / "trace")
    step = stored_variant(recorded, nodes, blocks, summary.variant)
    choice = read_record(ARTIFACTS / "solve" / "freezing.json", FreezeChoice)
    freezable = freezable_of(recorded, choice)
    units = freezable.units if freezable is not None else ()
    trace, own = step.trace, list(step.nodes)
    if choice.measures:
        own = nodes_with_copies(trace, own, relative=choice.relative)
    rows = read_rows(ARTIFACTS / "solve" / "plan.parquet", PlanRow)
    slots = read_rows(ARTIFACTS / "solve" / "slots.parquet", Slot)
    try:
        check_plan(trace, own, rows, slots, summary, units)
    except IllegalPlanError as error:
        raise TableError(f"{ARTIFACTS / 'solve'}: {error}: run the solve stage again (`dvc repro`).") from error
    source = emit_step(trace, own, rows, summary, slots, units)
    write_atomically(ARTIFACTS / "codegen" / "step.py", source.encode())
    manifest = manifest_of(source, summary.plan_hash, summary.configuration_hash)
    write_record(ARTIFACTS / "codegen" / "manifest.json", manifest)
    print(f"codegen: {ARTIFACTS / 'codegen' / 'step.py'}, {source.count(chr(10))} lines")


if __name__ == "__main__":
    run_stage(main)
