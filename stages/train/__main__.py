"""`python -m stowage.stages.train`: train under the plan, and beside it plain PyTorch; artifacts/train."""

from __future__ import annotations

import gc
import hashlib
import json
import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from torch import nn

from stowage.stages.device import device_of
from stowage.stages.device.heap import keep_freed_memory, trim
from stowage.stages.device.tiers import open_tier
from stowage.stages.inputs import imported_files, look_in_src, mend, require_listed
from stowage.stages.ir.command import ARTIFACTS, STORE, run_stage
from stowage.stages.ir.errors import PlanMismatchError, TableError
from stowage.stages.ir.files import write_atomically
from stowage.stages.ir.graph import Block, ComputeNode
from stowage.stages.ir.plan import Option, PlanRow, PlanSummary, Slot
from stowage.stages.ir.run import MemorySample, StepRecord, TraceSpan
from stowage.stages.ir.spans import chrome_trace, predicted_spans
from stowage.stages.ir.table import read_record, read_rows, write_rows
from stowage.stages.ir.trace import TraceTables
from stowage.stages.report import summary_table, write_report
from stowage.stages.report.facts import timed
from stowage.stages.rewrite import load_variant
from stowage.stages.runtime.bind import bind
from stowage.stages.runtime.contents import Contents
from stowage.stages.runtime.offloading import Offloading
from stowage.stages.runtime.resident import resident_limit
from stowage.stages.runtime.tensor_file import write_tensors
from stowage.stages.settings import Settings, load_settings
from stowage.stages.train.checkpoint import model_tensors
from stowage.stages.train.loop import Batches, Run, train_eager, train_planned
from stowage.stages.workload import sample_batch, scheduler_factory, token_stream
from stowage.stages.workload.calls import call_model, loss_of
from stowage.stages.workload.configured import configured_optimizer, configured_workload
from stowage.stages.workload.data import batch_at
from stowage.stages.workload.models import resolve, vocabulary_size

OUT = ARTIFACTS / "train"


@dataclass(frozen=True)
class Setup:
    """A model with what trains it, made anew for every run from the same seeds."""

    model: nn.Module
    sample: Any
    optimizer: torch.optim.Optimizer | None
    scheduler: Any
    loss: Callable[[Any], torch.Tensor]


def set_up(settings: Settings) -> Setup:
    """Model, optimizer and schedule as params.yaml says."""
    trace = settings.trace
    workload = configured_workload(trace)
    model = workload.model.to(trace.device)
    make = configured_optimizer(trace)
    optimizer = make(list(model.parameters())) if make else None
    schedule = settings.train.schedule
    scheduler = None
    if schedule is not None and optimizer is not None:
        scheduler = scheduler_factory(schedule.name, schedule.arguments)(optimizer)
    function = resolve(trace.loss, "trace.loss") if trace.loss else None
    return Setup(
        model, workload.batch, optimizer, scheduler, lambda batch: loss_of(call_model(model, batch), batch, function)
    )


def batches_of(settings: Settings, setup: Setup) -> Batches:
    """Iteration -> batch. Text for models of tokens; otherwise made-up batches, or the callable's own."""
    trace, train = settings.trace, settings.train
    device = torch.device(trace.device)

    def moved(batch: Any) -> Any:
        return {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}

    if trace.model.callable is not None:
        return lambda _: setup.sample
    if set(setup.sample) == {"input_ids", "labels"}:
        data = train.data
        stream = token_stream(data.source, data.column, data.tokenizer, vocabulary=vocabulary_size(setup.model))
        return lambda i: moved(batch_at(stream, trace.batch_size, trace.sequence_length, train.seed, i))
    return lambda i: moved(sample_batch(setup.model, trace.batch_size, trace.sequence_length, train.seed + i))


def compare(planned: list[StepRecord], eager: list[StepRecord]) -> list[StepRecord]:
    """Put eager's loss and time beside the plan's."""
    by_iteration = {r.iteration: r for r in eager}
    return [
        replace(r, eager_loss=by_iteration[r.iteration].loss, eager_time_s=by_iteration[r.iteration].time_s)
        if r.iteration in by_iteration
        else r
        for r in planned
    ]


def median_time_s(records: list[StepRecord]) -> float:
    """Of the iterations that say how long one takes."""
    return statistics.median([r.time_s for r in timed(records)] or [math.nan])


def metrics_of(
    summary: PlanSummary, records: list[StepRecord], eager: list[StepRecord], samples: list[MemorySample]
) -> dict[str, Any]:
    """What `dvc metrics` shows."""
    peaks = [r.peak_bytes for r in records if r.peak_bytes >= 0]
    eager_peaks = [r.peak_bytes for r in eager if r.peak_bytes >= 0]
    metrics: dict[str, Any] = {
        "device_budget_bytes": summary.device_budget_bytes,
        "predicted_peak_bytes": summary.device_peak_bytes,
        "measured_peak_bytes": max(peaks) if peaks else None,
        "predicted_step_time_s": summary.step_time_s,
        "measured_step_time_s": median_time_s(records),
        "final_loss": records[-1].loss,
    }
    if eager:
        metrics |= {
            "eager_peak_bytes": max(eager_peaks) if eager_peaks else None,
            "eager_step_time_s": median_time_s(eager),
            "step_time_over_eager": median_time_s(records) / median_time_s(eager),
            "losses_equal": [r.loss for r in records] == [r.loss for r in eager],
        }
    return metrics


def check_device(summary: PlanSummary, kind: str) -> None:
    """Refuse a plan that was made for another device."""
    fingerprint = device_of(kind).fingerprint()
    if summary.device_fingerprint and summary.device_fingerprint != fingerprint:
        raise PlanMismatchError(
            f"The plan was made for {summary.device}, and this machine is another device: make it the target "
            "(`python -m stowage.stages.device`) and run `dvc repro`."
        )


def main() -> None:
    """Train, compare, report."""
    settings, root = load_settings(), Path()
    look_in_src(root)
    require_listed(root, settings, "train", ())
    summary = read_record(ARTIFACTS / "solve" / "summary.json", PlanSummary)
    check_device(summary, settings.trace.device)
    trace = load_variant(ARTIFACTS / "trace", summary.variant)
    source, source_hash = read_source(summary)
    slots = read_rows(ARTIFACTS / "solve" / "slots.parquet", Slot)
    measure_every = settings.train.measure_every
    steps = settings.train.steps
    run_name = run_hash(settings, summary)
    checkpoint = STORE / "checkpoints" / summary.plan_hash / f"{run_name}.safetensors"
    eager = Run()
    if settings.trace.device == "cpu":
        keep_freed_memory()  # plain PyTorch has what the plan has
    with Progress() as bar:
        if settings.train.compare_eager:
            task = bar.add_task("plain PyTorch", total=steps)
            setup = set_up(settings)
            torch.manual_seed(settings.train.seed)
            eager = train_eager(
                setup.model,
                setup.optimizer,
                setup.scheduler,
                batches_of(settings, setup),
                setup.loss,
                steps=steps,
                measure_every=measure_every,
                progress=lambda done: bar.update(task, completed=done),
            )
            del setup
            gc.collect()
            trim()
        task = bar.add_task("under the plan", total=steps)
        tier = open_tier(settings.trace.device, settings.solve.offload_dir) if slots else None
        setup = set_up(settings)
        offloading = None
        if tier is not None:
            limit = resident_limit(setup.model, setup.optimizer, summary.device_budget_bytes)
            offloading = Offloading(tier, setup.model, setup.optimizer, limit)
        program = bind(
            source,
            source_hash,
            "artifacts/codegen/step.py",
            trace,
            setup.model,
            setup.optimizer,
            slots,
            offloading,
        )
        torch.manual_seed(settings.train.seed)
        planned = train_planned(
            program,
            setup.model,
            setup.optimizer,
            setup.scheduler,
            batches_of(settings, setup),
            steps=steps,
            measure_every=measure_every,
            checkpoint=checkpoint,
            checkpoint_every=settings.train.checkpoint_every,
            run_name=run_name,
            progress=lambda done: bar.update(task, completed=done),
        )
    records = compare(planned.records, eager.records)
    samples = planned.samples + eager.samples
    contents = Contents(setup.model, setup.optimizer, offloading)
    metrics = metrics_of(summary, planned.records, eager.records, samples)
    write(summary, trace, slots, records, samples, planned.spans, metrics, contents)
    checkpoint.unlink(missing_ok=True)
    if sentence := mend(root, settings, "train", imported_files(root)):
        print(f"{sentence}: `dvc repro` trains again.", file=sys.stderr)


def run_hash(settings: Settings, summary: PlanSummary) -> str:
    """What a checkpoint belongs to: the plan, the initial weights, the data and the schedule."""
    train = settings.train
    content = [summary.plan_hash, settings.trace.model_dump(), train.seed, train.data.model_dump()]
    content.append(train.schedule.model_dump() if train.schedule else None)
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def read_source(summary: PlanSummary) -> tuple[str, str]:
    """step.py and the hash its manifest states."""
    path, manifest_path = ARTIFACTS / "codegen" / "step.py", ARTIFACTS / "codegen" / "manifest.json"
    if not path.is_file() or not manifest_path.is_file():
        raise TableError(f"{path} or its manifest is missing: run the codegen stage (`dvc repro`).")
    manifest = json.loads(manifest_path.read_text())
    if manifest.get("plan_hash") != summary.plan_hash:
        raise PlanMismatchError(f"{path} belongs to another plan: run the codegen stage (`dvc repro`).")
    return path.read_text(), manifest["source_hash"]


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
        "plan": str(ARTIFACTS / "solve" / "plan.parquet"),
        "step.py": str(ARTIFACTS / "codegen" / "step.py"),
        "report": str(OUT / "report.html"),
        "trace": str(OUT / "trace.json"),
    }
    rows = read_rows(ARTIFACTS / "solve" / "plan.parquet", PlanRow)
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
