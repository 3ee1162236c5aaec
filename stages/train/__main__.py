"""Trains under the plan, and plain PyTorch beside it, into artifacts/train: `python -m stowage.stages.train`."""

from __future__ import annotations

import gc
import sys
from functools import partial
from pathlib import Path

import torch
from rich.progress import Progress

from stowage.stages.device.heap import keep_freed_memory, trim
from stowage.stages.device.tiers import open_tier
from stowage.stages.inputs import TRAIN, added_inputs, imported_files, listed_inputs, look_in_src, mend, require_listed
from stowage.stages.inputs.origin import ORIGIN, require_origin
from stowage.stages.ir.command import STORE, run_stage
from stowage.stages.ir.plan import PlanSummary, Slot
from stowage.stages.ir.source import file_name
from stowage.stages.ir.table import read_record, read_rows
from stowage.stages.runtime.executors.base import ExecutablePlan
from stowage.stages.runtime.executors.single import SingleDevice
from stowage.stages.runtime.offload.contents import Contents
from stowage.stages.settings import load_settings
from stowage.stages.train.checkpoint import saved_iteration
from stowage.stages.train.comparison import compare, metrics_of, require_equal
from stowage.stages.train.identity import checkpoint_of, run_name
from stowage.stages.train.loop import TrainingRun, train_eager, train_planned
from stowage.stages.train.plan_files import CODEGEN, SOLVE, check_device, planned_step, read_source
from stowage.stages.train.results import write
from stowage.stages.train.setup import Setup


def main() -> None:
    """Train, compare, report."""
    settings, root = load_settings(), Path()
    look_in_src(root)
    require_listed(root, settings, TRAIN, ())
    summary = read_record(SOLVE / "summary.json", PlanSummary)
    require_origin(ORIGIN, root, settings, summary.configuration_hash)
    check_device(summary, settings.trace.device)
    planned_way = planned_step(summary)
    trace = planned_way.trace
    source, manifest = read_source(summary)
    slots = read_rows(SOLVE / "slots.parquet", Slot)
    on_cpu = settings.trace.device == "cpu"
    if on_cpu:
        keep_freed_memory()  # plain PyTorch gets what the plan has
    setup = Setup.of(settings)
    code = {*listed_inputs(root)[TRAIN], *added_inputs(root, TRAIN), *imported_files(root)}
    name = run_name(root, settings, summary, setup, code)
    folder = STORE / "checkpoints" / file_name(summary.plan_hash, "a plan")
    steps = settings.train.steps
    checkpoint = checkpoint_of(folder, name, steps, saved_iteration(checkpoint_of(folder, name, steps, None)))
    eager = TrainingRun()
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
    write(summary, planned_way, slots, records, samples, planned.spans, metrics, contents)
    checkpoint.unlink(missing_ok=True)
    if on_cpu:  # kernels of a GPU need not repeat their bits
        require_equal(planned.records, eager.records)
    if sentence := mend(root, settings, TRAIN, imported_files(root)):
        print(f"{sentence}: `dvc repro` trains again.", file=sys.stderr)


if __name__ == "__main__":
    run_stage(main)
