"""Times planning: the choice for every group, by the number of GPUs and of layers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from stowage.flows.benchmarks.elixir.engines import Configuration
from stowage.flows.benchmarks.elixir.machines import PCIE, SXM, ElixirMachine
from stowage.flows.benchmarks.elixir.models import MODELS, OPT_175B, Gpt2
from stowage.flows.benchmarks.elixir.rows import sharding_problem
from stowage.flows.planning.sharding import SETTINGS, plan_groups

RANKS = (1, 2, 4, 8, 16, 32, 64)
LAYERS = (6, 12, 24, 48, 96)
BATCH = 4
"""Sequences for each GPU."""


@dataclass(frozen=True)
class PlanTime:
    """One planning.

    Attributes:
        case: what varies: "GPUs", "layers" or nothing.
        model: name of the model.
        machine: name of the machine.
        ranks: number of GPUs.
        layers: number of layers.
        seconds: time by the clock, from the model's description to the winner.
        winner: name of the winner, or "nothing fits".
        tflops: its TFLOPS for each GPU.
        gap: how far above the proven bound its time is, as a share of it.
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


def plan_times(say: Callable[[str], None] = lambda text: None) -> Iterator[PlanTime]:
    """Plan GPT2-20b on more and more GPUs, with more and more layers on four, and OPT-175B on 64."""
    model = MODELS["GPT2-20b"]
    jobs = [
        *(("GPUs", SXM, model, ranks) for ranks in RANKS),
        *(("layers", SXM, replace(model, layers=layers), 4) for layers in LAYERS),
        *(("", machine, OPT_175B, 64) for machine in (SXM, PCIE)),
    ]
    for case, machine, variant, ranks in jobs:
        found = _plan(case, machine, variant, ranks)
        say(f"{ranks} × {found.machine}, {found.model} of {found.layers} layers: planned in {found.seconds:.1f} s")
        yield found


def _plan(case: str, machine: ElixirMachine, model: Gpt2, ranks: int) -> PlanTime:
    start = time.perf_counter()
    result = plan_groups(sharding_problem(Configuration(machine, model, ranks, BATCH)), SETTINGS)
    seconds = time.perf_counter() - start
    best = result.best
    tflops = model.flops(BATCH) / best.judged.time_s / 1e12 if best else None
    gap = best.judged.time_s / result.bound_s - 1 if best and result.bound_s else None
    name = best.name if best else "nothing fits"
    return PlanTime(case, model.name, machine.name, ranks, model.layers, seconds, name, tflops, gap)
