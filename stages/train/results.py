"""Writes what training leaves in artifacts/train: tables, metrics, the final state, and the report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console

from stowage.stages.ir.command import ARTIFACTS
from stowage.stages.ir.curve import CurvePoint
from stowage.stages.ir.files import write_atomically
from stowage.stages.ir.plan import Option, PlanRow, PlanSummary, Slot
from stowage.stages.ir.run import MemorySample, StepRecord, TraceSpan
from stowage.stages.ir.spans import chrome_trace, predicted_spans
from stowage.stages.ir.table import read_rows, write_rows
from stowage.stages.report import ReportTables, summary_table, write_report
from stowage.stages.rewrite import Way
from stowage.stages.runtime.offload.contents import Contents
from stowage.stages.train.checkpoint import model_tensors
from stowage.stages.train.plan_files import CODEGEN, SOLVE

OUT = ARTIFACTS / "train"


def write_final(contents: Contents) -> None:
    """Write the trained model: parameters and buffers, whole."""
    tensors = [(k.removeprefix("model/"), v) for k, v in model_tensors(contents.model).items()]
    contents.write(OUT / "final.safetensors", contents.entries(tensors), {})


def write(
    summary: PlanSummary,
    step: Way,
    slots: list[Slot],
    records: list[StepRecord],
    samples: list[MemorySample],
    measured: list[TraceSpan],
    metrics: dict[str, Any],
) -> None:
    """Write tables, metrics and report, and print the closing table."""
    write_rows(OUT / "steps.parquet", StepRecord, records)
    write_rows(OUT / "memory.parquet", MemorySample, samples)
    write_atomically(OUT / "metrics.json", (json.dumps(metrics, indent=2) + "\n").encode())
    paths = {
        "plan": str(SOLVE / "plan.parquet"),
        "step.py": str(CODEGEN / "step.py"),
        "report": str(OUT / "report.html"),
        "trace": str(OUT / "trace.json"),
    }
    rows = read_rows(SOLVE / "plan.parquet", PlanRow)
    trace, nodes = step.trace, list(step.nodes)
    spans = [*predicted_spans(rows, nodes, slots), *measured]
    labels = {"plan": summary.plan_hash, "method": summary.method, "device": summary.device}
    write_atomically(OUT / "trace.json", chrome_trace(spans, labels).encode())
    options_path = ARTIFACTS / "options" / "options.parquet"
    tables = ReportTables(
        storages=trace.storages,
        nodes=nodes,
        blocks=list(step.blocks),
        options=read_rows(options_path, Option) if options_path.exists() else (),
        plan_rows=rows,
        summary=summary,
        steps=records,
        memory=samples,
        streams=spans if measured else (),
        curve=read_rows(SOLVE / "curve.parquet", CurvePoint),
        calls=trace.calls,
        paths=paths,
        title=trace.meta.model,
    )
    write_report(Path(OUT), tables)
    console = Console()
    console.print(summary_table(summary, records, samples))
    for label, path in paths.items():
        console.print(f"{label}: {path}")
