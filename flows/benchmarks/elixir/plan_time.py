"""Times planning, by the number of GPUs and of layers: the choice for every group, and a sharded step as a whole."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from stowage.flows.benchmarks.elixir.engines import Configuration
from stowage.flows.benchmarks.elixir.machines import PCIE, SXM, ElixirMachine
from stowage.flows.benchmarks.elixir.models import MODELS, OPT_175B, Gpt2
from stowage.flows.benchmarks.elixir.rows import sharding_problem
from stowage.flows.planning.sharding import SETTINGS, plan_groups
from stowage.stages.formulations.sharding.race import RaceResult

RANKS = (1, 2, 4, 8, 16, 32, 64)
LAYERS = (6, 12, 24, 48, 96)
BATCH = 4
"""Sequences for each GPU."""


Job = tuple[str, ElixirMachine, Gpt2, int]
"""What varies ("GPUs", "layers" or nothing), a machine, a model, and a number of GPUs."""


@dataclass(frozen=True)
class PlanTime:
    """One planning.

    Attributes:
        case: what varies: "GPUs", "layers" or nothing.
        model: name of the model.
        machine: name of the machine.
        ranks: number of GPUs.
        layers: number of layers.
        seconds: time by the clock, from the model's description to the winner; of a step, time of the processor.
        winner: name of the winner, or how the plan was made; "nothing fits" where there is none.
        tflops: its TFLOPS for each GPU.
        gap: how far above the proven bound its time is, as a share of it; of a step, above that of computing and rates.
    """

    case: str
    model: str
    machine: str
    ranks: int
    layers: int
    seconds: float
    winner: str
    tflops: float | None
    gap: float | None


def jobs() -> list[Job]:
    """List what is timed: GPT2-20b on more and more GPUs, with more layers on four, and OPT-175B on 64."""
    model = MODELS["GPT2-20b"]
    return [
        *(("GPUs", SXM, model, ranks) for ranks in RANKS),
        *(("layers", SXM, replace(model, layers=layers), 4) for layers in LAYERS),
        *(("", machine, OPT_175B, 64) for machine in (SXM, PCIE)),
    ]


def plan_times(say: Callable[[str], None] = lambda text: None) -> Iterator[PlanTime]:
    """Choose for the groups of every job, and for those of OPT-175B from its trace."""
    for case, machine, variant, ranks in jobs():
        found = _plan(case, machine, variant, ranks)
        say(f"{ranks} × {found.machine}, {found.model} of {found.layers} layers: planned in {found.seconds:.1f} s")
        yield found
    found = plan_from_trace()
    say(f"64 × {found.machine}, {found.model}: planned in {found.seconds:.1f} s")
    yield found


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
    return PlanTime(case, name, machine.name, ranks, layers, seconds, winner, tflops, gap)
