"""Trains under the plan, and plain PyTorch beside it, into artifacts/train: `python -m stowage.stages.train`."""

from __future__ import annotations

import gc
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from rich.progress import Progress
from torch import nn

from stowage.stages.device.heap import keep_freed_memory, trim
from stowage.stages.device.tiers import open_tier
from stowage.stages.inputs import TRAIN, added_inputs, imported_files, listed_inputs, look_in_src, mend, require_listed
from stowage.stages.inputs.origin import ORIGIN, require_origin
from stowage.stages.ir.command import ARTIFACTS, STORE, run_stage
from stowage.stages.ir.lossy import ERRORS, GradientError
from stowage.stages.ir.plan import PlanSummary, Slot
from stowage.stages.ir.source import file_name
from stowage.stages.ir.table import read_record, read_rows
from stowage.stages.ir.trace import TraceTables
from stowage.stages.rewrite import is_exact
from stowage.stages.runtime.executors.base import ExecutablePlan, MakeExecutor
from stowage.stages.runtime.executors.sharded import ShardedDevice
from stowage.stages.runtime.executors.single import SingleDevice
from stowage.stages.runtime.sharding.sharding import Sharding
from stowage.stages.settings import Settings, load_settings
from stowage.stages.train.checkpoint import saved_iteration
from stowage.stages.train.comparison import compare, metrics_of, require_equal, require_near
from stowage.stages.train.identity import checkpoint_of, run_name
from stowage.stages.train.launch import is_rank, launch, obey
from stowage.stages.train.loop import TrainingRun, train_eager, train_planned
from stowage.stages.train.plan_files import (
    CODEGEN,
    SOLVE,
    check_device,
    check_errors,
    check_leave,
    frozen_training,
    planned_freezing,
    planned_step,
    read_source,
)
from stowage.stages.train.rank import Rank, distributed, one_of_several
from stowage.stages.train.results import write, write_final
from stowage.stages.train.setup import Setup


def train_plain(
    settings: Settings, setup: Setup, trace: TraceTables, rank: Rank, progress: Callable[[int], None]
) -> TrainingRun:
    """Train with plain PyTorch, on several ranks by its DistributedDataParallel."""
    model: nn.Module = setup.model
    frozen = frozen_training(rank.ranks)
    buckets_bytes = 0
    if rank.ranks is not None:
        trainable = [p for p in model.parameters() if p.requires_grad]
        used = {g.parameter for g in trace.gradients if g.gradient_value >= 0}
        unused = any(n not in used for n, p in model.named_parameters() if p.requires_grad)
        model = distributed(model, unused or frozen is not None)
        buckets_bytes = sum(p.numel() * p.element_size() for p in trainable)
    return train_eager(
        setup.model,
        setup.optimizer,
        setup.scheduler,
        rank.batches(setup.batches(settings)),
        setup.loss_by(model),
        steps=settings.train.steps,
        measure_every=settings.train.measure_every,
        progress=progress,
        staging_bytes=buckets_bytes,
        share=rank.share,
        frozen=frozen,
    )


def main() -> None:
    """Train, compare, report; on several ranks, start them first."""
    settings = load_settings()
    ranks = settings.trace.ranks
    if is_rank(ranks):
        obey()
        with one_of_several(settings.trace.device) as rank:
            train(settings, rank)
    elif ranks > 1:
        check_leave(read_record(SOLVE / "summary.json", PlanSummary), settings)  # here, in one word for all of them
        launch("stowage.stages.train", ranks)
    else:
        train(settings, Rank())


ADDED_IN_ONE_ORDER = 2
"""So many ranks' gradients have one sum, in whatever order they are added."""


def train(settings: Settings, rank: Rank) -> None:
    """Train as one rank of the run."""
    root = Path()
    look_in_src(root)
    require_listed(root, settings, TRAIN, ())
    summary = read_record(SOLVE / "summary.json", PlanSummary)
    require_origin(ORIGIN, root, settings, summary.configuration_hash)
    check_device(summary, settings.trace.device)
    check_leave(summary, settings)
    if settings.lossy.leave is not None:
        recorded = TraceTables.load(ARTIFACTS / "trace")
        check_errors(summary, recorded, read_rows(ARTIFACTS / "trace" / ERRORS, GradientError))
    planned_way = planned_step(summary)
    trace = planned_way.trace
    source, manifest = read_source(summary)
    slots = read_rows(SOLVE / "slots.parquet", Slot)
    on_cpu = settings.trace.device == "cpu"
    if on_cpu:
        keep_freed_memory()  # plain PyTorch gets what the plan has
    setup = Setup.of(settings)
    code = {*listed_inputs(root)[TRAIN], *added_inputs(root, TRAIN), *imported_files(root)}
    name = run_name(root, settings, summary, setup, code, planned_freezing())
    rank.agree("plan, model, text or torch", f"{name} {manifest.source_hash}")
    folder = STORE / "checkpoints" / file_name(summary.plan_hash, "a plan")
    steps = settings.train.steps
    checkpoint = checkpoint_of(folder, name, steps, saved_iteration(checkpoint_of(folder, name, steps, None)))
    eager = TrainingRun()
    with Progress(disable=not rank.writes) as bar:
        if settings.train.compare_eager:
            task = bar.add_task("plain PyTorch", total=steps)
            torch.manual_seed(rank.seed(settings.train.seed))
            eager = train_plain(settings, setup, trace, rank, lambda done: bar.update(task, completed=done))
            del setup
            gc.collect()
            trim()
            setup = Setup.of(settings)
        task = bar.add_task("under the plan", total=steps)
        tier = partial(open_tier, settings.trace.device, settings.solve.offload_dir)
        make: MakeExecutor = SingleDevice
        if rank.ranks is not None:
            make = partial(ShardedDevice, sharding=Sharding(setup.model, setup.optimizer, rank.ranks))
        executor = make(setup.model, setup.optimizer, tier)
        frozen = frozen_training(rank.ranks)
        units = frozen.schedule.freezable.units if frozen is not None else ()
        path, budget = CODEGEN / "step.py", summary.device_budget_bytes
        program = executor.bind(ExecutablePlan(source, manifest, path, trace, slots, budget, units))
        contents = executor.contents()
        torch.manual_seed(rank.seed(settings.train.seed))
        planned = train_planned(
            program,
            contents,
            setup.scheduler,
            rank.batches(setup.batches(settings)),
            steps=steps,
            measure_every=settings.train.measure_every,
            checkpoint=checkpoint,
            checkpoint_every=settings.train.checkpoint_every,
            run_name=name,
            progress=lambda done: bar.update(task, completed=done),
            share=rank.share,
            frozen=frozen,
        )
    records = compare(planned.records, eager.records)
    samples = planned.samples + eager.samples
    metrics = metrics_of(summary, planned.records, eager.records)
    write_final(contents)
    if not rank.writes:
        return
    write(summary, planned_way, slots, records, samples, planned.spans, metrics)
    if checkpoint.is_dir():
        shutil.rmtree(checkpoint)
    else:
        checkpoint.unlink(missing_ok=True)
    if not is_exact(summary.variant):
        return
    if on_cpu and rank.count <= ADDED_IN_ONE_ORDER:  # kernels of a GPU need not repeat their bits
        require_equal(planned.records, eager.records)
    elif on_cpu and (far := require_near(planned.records, eager.records)):
        print(far)
    if sentence := mend(root, settings, TRAIN, imported_files(root)):
        print(f"{sentence}: `dvc repro` trains again.", file=sys.stderr)


if __name__ == "__main__":
    run_stage(main)
