"""Simulates every configuration of Tables 7 and 8 under every engine, and keeps it beside what was published."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from stowage.flows.benchmarks.elixir.constants import is_fitted
from stowage.flows.benchmarks.elixir.engines import ENGINES, Configuration
from stowage.flows.benchmarks.elixir.machines import DRIVER_BYTES, MACHINES
from stowage.flows.benchmarks.elixir.models import MODELS
from stowage.flows.benchmarks.elixir.published import PublishedRow, best_of_deepspeed, published_rows
from stowage.flows.planning.sharding import plan_groups
from stowage.stages.formulations.sharding.problem import ShardingProblem
from stowage.stages.formulations.sharding.race import RaceResult
from stowage.stages.solver.outcome import SolverSettings

EFFORT = SolverSettings(time_limit_s=4.0, gap=5e-3)
"""Limits of each exact choice."""

PLAN_B = "stowage.flows.benchmarks.elixir.plan_b"
"""Module of `plan_b_time(configuration, machine, budget)`, which returns seconds of a step, or None without a plan."""

PLANNED_BATCH = 8
"""The batch of Table 2, for which sharded plans are made: each takes up to a minute."""


@dataclass(frozen=True)
class ElixirRow:
    """One configuration: simulated and published TFLOPS, None where memory does not suffice.

    Attributes:
        published: the row of Table 7 or 8.
        simulated: TFLOPS by engine.
        lacks: which memory does not suffice, by engine: "device", "host", or nothing.
        device_bytes: most bytes on a device, by engine.
        host_bytes: bytes in the host, by engine.
        choices: the race for FSDP2's groups.
        fsdp2: TFLOPS of its winner.
        plan_b: TFLOPS of a sharded plan; None where there is none, or none is made (see `PLANNED_BATCH`).
    """

    published: PublishedRow
    simulated: dict[str, float | None]
    lacks: dict[str, str]
    device_bytes: dict[str, int]
    host_bytes: dict[str, int]
    choices: RaceResult
    fsdp2: float | None
    plan_b: float | None

    @property
    def fitted(self) -> bool:
        """Return whether the constants were fitted to its cells."""
        return is_fitted(self.published)


def speedup(tflops: Mapping[str, float | None]) -> float | None:
    """Return Elixir's TFLOPS over the best of DeepSpeed's, None where one of them did not run."""
    elixir, best = tflops["elixir"], best_of_deepspeed(tflops)
    return elixir / best if elixir and best else None


def elixir_rows(say: Callable[[str], None] = lambda text: None) -> Iterator[ElixirRow]:
    """Simulate every row of Tables 7 and 8."""
    for published in published_rows():
        row = elixir_row(published)
        say(
            f"{published.machine}, {published.ranks} × {published.model}, batch {published.batch}: "
            f"Elixir {_tflops(row.simulated['elixir'])} ({_tflops(published.tflops['elixir'])} published)"
        )
        yield row


def elixir_row(published: PublishedRow) -> ElixirRow:
    """Simulate one row."""
    c = Configuration(MACHINES[published.machine], MODELS[published.model], published.ranks, published.batch)
    outcomes = {engine: simulate(c) for engine, simulate in ENGINES.items()}
    choices = plan_groups(sharding_problem(c), EFFORT)
    flops = c.model.flops(c.batch)
    return ElixirRow(
        published,
        {engine: c.tflops(outcome) for engine, outcome in outcomes.items()},
        {engine: outcome.lacks(c.parallel) for engine, outcome in outcomes.items()},
        {engine: outcome.device_bytes for engine, outcome in outcomes.items()},
        {engine: outcome.host_bytes for engine, outcome in outcomes.items()},
        choices,
        flops / choices.best.judged.time_s / 1e12 if choices.best else None,
        _plan_b(c),
    )


def sharding_problem(c: Configuration) -> ShardingProblem:
    """Describe a configuration for FSDP2: all of the memory that can be used, updates as fast as Elixir's."""
    machine = c.parallel
    host_updates = machine.host_updates_per_s * c.machine.constants.host_share
    machine = replace(machine, host_updates_per_s=host_updates)
    return ShardingProblem(c.groups, machine, machine.device_bytes, machine.host_bytes, fixed_bytes=DRIVER_BYTES)


def _plan_b(c: Configuration) -> float | None:
    if c.batch != PLANNED_BATCH or find_spec(PLAN_B) is None:
        return None
    plan_b_time: Callable[[Any, Any, int], float | None] = import_module(PLAN_B).plan_b_time
    problem = sharding_problem(c)
    seconds = plan_b_time(c, problem.machine, problem.device_budget)
    return None if seconds is None else c.model.flops(c.batch) / seconds / 1e12


def _tflops(value: float | None) -> str:
    return "out of memory" if value is None else f"{value:.0f}"
