"""Time and memory of one rank from 1 to 64 GPUs, for every engine, for choices for groups, and for sharded plans."""

from __future__ import annotations

from typing import Any

from stowage.flows.benchmarks.elixir.engines import ENGINES, Configuration
from stowage.flows.benchmarks.elixir.machines import MACHINES, P4D
from stowage.flows.benchmarks.elixir.models import MODELS
from stowage.flows.benchmarks.elixir.plan_cells import PlanCell, PlanCells
from stowage.flows.benchmarks.elixir.plan_time import RANKS
from stowage.flows.benchmarks.elixir.rows import EFFORT, sharding_problem
from stowage.flows.planning.sharding import plan_groups

MODEL, BATCH = MODELS["GPT2-20b"], 8
GIB = 1 << 30


def scaling_configurations() -> list[Configuration]:
    """List the machines with 1 to 64 GPUs."""
    return [Configuration(machine, MODEL, ranks, BATCH) for machine in (*MACHINES.values(), P4D) for ranks in RANKS]


def scaling_rows(cells: PlanCells) -> list[dict[str, Any]]:
    """Simulate every engine; of sharded plans, show what is planned by now."""
    return [_row(c, cells.kept(c)) for c in scaling_configurations()]


def _row(c: Configuration, cell: PlanCell | None) -> dict[str, Any]:
    found = {}
    for engine, simulate in ENGINES.items():
        outcome = simulate(c)
        found[engine] = rank_words(c.tflops(outcome), outcome.device_bytes)
    race = plan_groups(sharding_problem(c), EFFORT)
    shown = race.best or min(race.contestants, key=lambda k: k.judged.device_bytes)
    tflops = c.model.flops(c.batch) / race.best.judged.time_s / 1e12 if race.best else None
    found["fsdp2"] = rank_words(tflops, shown.judged.device_bytes)
    return {"machine": c.machine.name, "ranks": c.ranks, **found, "plan_b": "" if cell is None else plan_words(cell)}


def plan_words(cell: PlanCell) -> str:
    """Return TFLOPS and memory of a sharded plan for people."""
    return rank_words(cell.tflops, cell.device_bytes)


def rank_words(tflops: float | None, device_bytes: int | None) -> str:
    """Return TFLOPS and GiB of one rank for people; where memory does not suffice, what is needed on the device."""
    memory = "" if device_bytes is None else f" ({device_bytes / GIB:.0f})"
    return f"{tflops_words(tflops)}{memory}"


def tflops_words(tflops: float | None) -> str:
    """Return TFLOPS for people, "OOM" where there are none."""
    return "OOM" if tflops is None else f"{tflops:.0f}"
