"""`python -m stowage.stages.train`: train under the plan, and beside it plain PyTorch; artifacts/train."""

from __future__ import annotations

import gc
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from stowage.stages.device import device_of
from stowage.stages.device.heap import keep_freed_memory, trim
from stowage.stages.device.tiers import open_tier
from stowage.stages.inputs import TRAIN, imported_files, listed_inputs, look_in_src, mend, require_listed
from stowage.stages.inputs.origin import require_origin
from stowage.stages.ir.command import ARTIFACTS, STORE, run_stage
from stowage.stages.ir.errors import PlanMismatchError, TableError
from stowage.stages.ir.files import write_atomically
from stowage.stages.ir.graph import Block, ComputeNode
from stowage.stages.ir.plan import Manifest, Option, PlanRow, PlanSummary, Slot
from stowage.stages.ir.run import MemorySample, StepRecord, TraceSpan
from stowage.stages.ir.source import file_name
from stowage.stages.ir.spans import chrome_trace, predicted_spans
from stowage.stages.ir.table import read_record, read_rows, write_rows
from stowage.stages.ir.trace import TraceTables
from stowage.stages.report import summary_table, write_report
from stowage.stages.rewrite import load_variant
from stowage.stages.runtime.executors.base import ExecutablePlan
from stowage.stages.runtime.executors.single import SingleDevice
from stowage.stages.runtime.files.tensor_file import write_tensors
from stowage.stages.runtime.offload.contents import Contents
from stowage.stages.settings import load_settings
from stowage.stages.train.checkpoint import model_tensors, saved_iteration
from stowage.stages.train.comparison import compare, metrics_of, require_equal
from stowage.stages.train.identity import checkpoint_of, run_name
from stowage.stages.train.loop import Run, train_eager, train_planned
from stowage.stages.train.setup import Setup

OUT = ARTIFACTS / "train"
SOLVE, CODEGEN = ARTIFACTS / "solve", ARTIFACTS / "codegen"


def check_device(summary: PlanSummary, kind: str) -> None:
    """Refuse a plan that was made for another device."""
    fingerprint = device_of(kind).fingerprint()
    if summary.device_fingerprint and summary.device_fingerprint != fingerprint:
        raise PlanMismatchError(
            f"The plan was made for {summary.device}, and this machine is another device: make it the target "
            "(`python -m stowage.stages.device`) and run `dvc repro`."
        )


def read_source(summary: PlanSummary) -> tuple[str, Manifest]:
    """The text of step.py, and its manifest."""
    path = CODEGEN / "step.py"
    manifest = read_record(CODEGEN / "manifest.json", Manifest)
    if not path.is_file():
        raise TableError(f"{path} is missing: run the codegen stage (`dvc repro`).")
    if (manifest.plan_hash, manifest.configuration_hash) != (summary.plan_hash, summary.configuration_hash):
        raise PlanMismatchError(f"{path} belongs to another plan: run the codegen stage (`dvc repro`).")
    try:
        return path.read_text(encoding="utf-8"), manifest
    except (OSError, UnicodeDecodeError) as error:
        raise TableError(f"{path} cannot be read ({error}): run the codegen stage (`dvc repro`).") from error


def main() -> None:
    """Train, compare, report."""
    settings, root = load_settings(), Path()
    look_in_src(root)
    require_listed(root, settings, TRAIN, ())
    summary = read_record(SOLVE / "summary.json", PlanSummary)
    require_origin(ARTIFACTS / "trace" / "origin.json", root, settings, summary.configuration_hash)
    check_device(summary, settings.trace.device)
    trace = load_variant(ARTIFACTS / "trace", summary.variant)
    source, manifest = read_source(summary)
    slots = read_rows(SOLVE / "slots.parquet", Slot)
    on_cpu = settings.trace.device == "cpu"
    if on_cpu:
        keep_freed_memory()  # plain PyTorch has what the plan has
    setup = Setup.of(settings)
    code = {*listed_inputs(root)[TRAIN], *imported_files(root)}
    name = run_name(root, settings, summary, setup, code)
    folder = STORE / "checkpoints" / file_name(summary.plan_hash, "a plan")
    steps = settings.train.steps
    checkpoint = checkpoint_of(folder, name, steps, saved_iteration(checkpoint_of(folder, name, steps, None)))
    eager = Run()
    with Progress() as bar:
        if settings.train.compare_eager:
            task = bar.add_task("plain PyTorch", total=steps)
            torch.manual_seed(settings.train.seed)
            eager = train_eager(
                setup.model,
                setup.optimizer,
                setup.scheduler,
                setup.batches(settings),
                setup.loss,
                steps=steps,
                measure_every=settings.train.measure_every,
                progress=lambda done: bar.update(task, completed=done),
            )
            del setup
            gc.collect()
            trim()
            setup = Setup.of(settings)
        task = bar.add_task("under the plan", total=steps)
        tier = partial(open_tier, settings.trace.device, settings.solve.offload_dir)
        executor = SingleDevice(setup.model, setup.optimizer, tier)
        path, budget = CODEGEN / "step.py", summary.device_budget_bytes
        program = executor.bind(ExecutablePlan(source, manifest, path, trace, slots, budget))
        torch.manual_seed(settings.train.seed)
        planned = train_planned(
            program,
            setup.model,
            setup.optimizer,
            setup.scheduler,
            setup.batches(settings),
            steps=steps,
            measure_every=settings.train.measure_every,
            checkpoint=checkpoint,
            checkpoint_every=settings.train.checkpoint_every,
            run_name=name,
            progress=lambda done: bar.update(task, completed=done),
        )
    records = compare(planned.records, eager.records)
    samples = planned.samples + eager.samples
    contents = Contents(setup.model, setup.optimizer, executor.offloading)
    metrics = metrics_of(summary, planned.records, eager.records)
    write(summary, trace, slots, records, samples, planned.spans, metrics, contents)
    checkpoint.unlink(missing_ok=True)
    if on_cpu:  # kernels of a GPU need not repeat their bits
        require_equal(planned.records, eager.records)
    if sentence := mend(root, settings, TRAIN, imported_files(root)):
        print(f"{sentence}: `dvc repro` trains again.", file=sys.stderr)


def write(
    summary: PlanSummary,
    trace: TraceTables,
    slots: list[Slot],
    records: list[StepRecord],
    samples: list[MemorySample],
    measured: list[TraceSpan],
    metrics: dict[str, Any],
    contents: Contents,
) -> None:
    """Tables, metrics, final state, report, and the closing table on the terminal."""
    write_rows(OUT / "steps.parquet", StepRecord, records)
    write_rows(OUT / "memory.parquet", MemorySample, samples)
    write_atomically(OUT / "metrics.json", (json.dumps(metrics, indent=2) + "\n").encode())
    tensors = [(k.removeprefix("model/"), v) for k, v in model_tensors(contents.model).items()]
    write_tensors(OUT / "final.safetensors", contents.entries(tensors))
    paths = {
        "plan": str(SOLVE / "plan.parquet"),
        "step.py": str(CODEGEN / "step.py"),
        "report": str(OUT / "report.html"),
        "trace": str(OUT / "trace.json"),
    }
    rows = read_rows(SOLVE / "plan.parquet", PlanRow)
    every = read_rows(ARTIFACTS / "partition" / "nodes.parquet", ComputeNode)
    nodes = [n for n in every if n.variant == summary.variant]
    spans = [*predicted_spans(rows, nodes, slots), *measured]
    labels = {"plan": summary.plan_hash, "method": summary.method, "device": summary.device}
    write_atomically(OUT / "trace.json", chrome_trace(spans, labels).encode())
    blocks = read_rows(ARTIFACTS / "partition" / "blocks.parquet", Block)
    options_path = ARTIFACTS / "options" / "options.parquet"
    write_report(
        Path(OUT),
        storages=trace.storages,
        nodes=nodes,
        blocks=[b for b in blocks if b.variant == summary.variant],
        options=read_rows(options_path, Option) if options_path.exists() else (),
        plan_rows=rows,
        summary=summary,
        steps=records,
        memory=samples,
        streams=spans if measured else (),
        paths=paths,
        title=trace.meta.model,
    )
    console = Console()
    console.print(summary_table(summary, records, samples))
    for label, path in paths.items():
        console.print(f"{label}: {path}")


if __name__ == "__main__":
    run_stage(main)
