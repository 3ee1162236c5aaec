"""Times planning, by the number of GPUs and of layers: of the choice for every group, and of a sharded step."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from stowage.flows.benchmarks.elixir.engines import Configuration
from stowage.flows.benchmarks.elixir.kept import Kept
from stowage.flows.benchmarks.elixir.machines import PCIE, SXM, ElixirMachine
from stowage.flows.benchmarks.elixir.models import MODELS, OPT_175B, Gpt2
from stowage.flows.benchmarks.elixir.rows import sharding_problem
from stowage.flows.planning.sharding import SETTINGS, plan_groups
from stowage.stages.formulations.sharding.race import RaceResult

RANKS = (1, 2, 4, 8, 16, 32, 64)
LAYERS = (6, 12, 24, 48, 96)
BATCH = 4
"""Sequences for each GPU."""


@dataclass(frozen=True)
class PlanTime:
    """One planning.

    Attributes:
        case: what varies: "GPUs", "layers" or nothing.
        planned: what is planned: "groups", or a "step" as a whole, from its trace.
        model: name of the model.
        machine: name of the machine.
        ranks: number of GPUs.
        layers: number of layers.
        seconds: time by the clock, from the model's description to the winner.
        winner: name of the winner, or how the plan was made; "nothing fits" where there is none.
        tflops: its TFLOPS for each GPU.
        gap: how far above the proven bound its time is, as a share of it; of a step, above that of computing and rates.
    """

    case: str
    planned: str
    model: str
    machine: str
    ranks: int
    layers: int
    seconds: float
    winner: str
    tflops: float | None
    gap: float | None


def jobs() -> list[tuple[str, ElixirMachine, Gpt2, int]]:
    """List what is timed: GPT2-20b on more and more GPUs, with more layers on four, and OPT-175B on 64."""
    model = MODELS["GPT2-20b"]
    return [
        *(("GPUs", SXM, model, ranks) for ranks in RANKS),
        *(("layers", SXM, replace(model, layers=layers), 4) for layers in LAYERS),
        *(("", machine, OPT_175B, 64) for machine in (SXM, PCIE)),
    ]


def plan_times(kept: Kept, say: Callable[[str], None] = lambda text: None) -> Iterator[PlanTime]:
    """Time every job, with OPT-175B from its trace too; steps that were planned before are not planned again."""
    for job in jobs():
        yield _said(_plan(*job), say)
    yield _said(plan_from_trace(), say)
    for case, machine, model, ranks in jobs():
        name = machine.name, model.name, ranks, model.layers, "time"
        before = kept.find(*name)
        if before is None:
            before = asdict(_said(_plan_step(case, machine, model, ranks), say))
            kept.keep(before, *name)
        yield PlanTime(**{**before, "case": case})


def _said(found: PlanTime, say: Callable[[str], None]) -> PlanTime:
    what = f"{found.ranks} × {found.machine}, {found.model} of {found.layers} layers"
    say(f"{what}: {found.planned} planned in {found.seconds:.1f} s")
    return found


def plan_from_trace() -> PlanTime:
    """Trace OPT-175B and plan it on 64 GPUs; the time holds both."""
    from stowage.flows.benchmarks.elixir.traced import TOKENS, opt_175b, traced_groups  # imports torch

    start = time.perf_counter()
    model = opt_175b()
    groups = traced_groups(model)
    problem = replace(sharding_problem(Configuration(PCIE, OPT_175B, 64, 1)), groups=groups)
    result = plan_groups(problem, SETTINGS)
    flops = 8.0 * sum(g.elements for g in groups) * TOKENS
    return _found("", "OPT-175B, traced too", PCIE, 64, len(groups) - 1, time.perf_counter() - start, result, flops)


def _plan(case: str, machine: ElixirMachine, model: Gpt2, ranks: int) -> PlanTime:
    start = time.perf_counter()
    result = plan_groups(sharding_problem(Configuration(machine, model, ranks, BATCH)), SETTINGS)
    seconds = time.perf_counter() - start
    return _found(case, model.name, machine, ranks, model.layers, seconds, result, model.flops(BATCH))


def _plan_step(case: str, machine: ElixirMachine, model: Gpt2, ranks: int) -> PlanTime:
    """Trace and plan a sharded step; the time holds both."""
    from stowage.flows.benchmarks.elixir.plan_b import case_of, planned  # imports torch

    start = time.perf_counter()
    problem = sharding_problem(Configuration(machine, model, ranks, BATCH))
    with tempfile.TemporaryDirectory() as stores:
        made = case_of(
            Configuration(machine, model, ranks, BATCH), problem.machine, problem.device_budget, Path(stores)
        )
        best = planned(made)
    seconds = time.perf_counter() - start
    tflops = model.flops(BATCH) / best.time_s / 1e12 if best else None
    gap = max(0.0, best.referee_s / best.bound_s - 1) if best and best.bound_s else None
    winner = best.method if best else "nothing fits"
    return PlanTime(case, "step", model.name, machine.name, ranks, model.layers, seconds, winner, tflops, gap)


def _found(
    case: str,
    name: str,
    machine: ElixirMachine,
    ranks: int,
    layers: int,
    seconds: float,
    result: RaceResult,
    flops: float,
) -> PlanTime:
    best = result.best
    tflops = flops / best.judged.time_s / 1e12 if best else None
    gap = max(0.0, best.judged.time_s / result.bound_s - 1) if best and result.bound_s else None
    winner = best.name if best else "nothing fits"
    return PlanTime(case, "groups", name, machine.name, ranks, layers, seconds, winner, tflops, gap)
