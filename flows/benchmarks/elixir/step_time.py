"""Times planning a sharded step as a whole, from tracing the model to the plan, by the number of GPUs and of layers."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

from stowage.flows.benchmarks.elixir.engines import Configuration
from stowage.flows.benchmarks.elixir.kept import Kept
from stowage.flows.benchmarks.elixir.plan_b import case_of, planned
from stowage.flows.benchmarks.elixir.plan_time import BATCH, Job, PlanTime, jobs
from stowage.flows.benchmarks.elixir.rows import sharding_problem
from stowage.flows.planning.effort import processor_s

IMPORTED = ("torch._dynamo", "transformers.models.gpt2.modeling_gpt2")
"""Modules that the first trace of a process imports, which takes seconds."""


def step_times(kept: Kept, say: Callable[[str], None] = lambda text: None, *, anew: bool = True) -> Iterator[PlanTime]:
    """Plan the step of every job that is not kept; without `anew`, leave those out."""
    for job in jobs():
        case, machine, model, ranks = job
        name = "time", machine.name, model.name, ranks, model.layers
        before = kept.find(*name)
        if before is None and anew:
            found = plan_step(job)
            before = asdict(found)
            kept.keep(before, *name)
            what = f"{ranks} × {machine.name}, {model.name} of {model.layers} layers"
            say(f"{what}: step planned in {found.seconds:.0f} s of the processor")
        if before is not None:
            yield PlanTime(**{**before, "case": case})


def plan_step(job: Job) -> PlanTime:
    """Trace and plan one step; the time holds no imports of PyTorch's and transformers' modules."""
    case, machine, model, ranks = job
    for module in IMPORTED:
        import_module(module)
    start = processor_s()
    c = Configuration(machine, model, ranks, BATCH)
    problem = sharding_problem(c)
    with tempfile.TemporaryDirectory() as stores:
        best = planned(case_of(c, problem.machine, problem.device_budget, Path(stores)))
    seconds = processor_s() - start
    if best is None:
        return PlanTime(case, model.name, machine.name, ranks, model.layers, seconds, "nothing fits", None, None)
    tflops = model.flops(BATCH) / best.time_s / 1e12
    gap = max(0.0, best.referee_s / best.bound_s - 1) if best.bound_s else None
    return PlanTime(case, model.name, machine.name, ranks, model.layers, seconds, best.method, tflops, gap)
