"""Simulates every configuration of Tables 7 and 8 under every engine, and keeps it beside what was published."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

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
    """

    published: PublishedRow
    simulated: dict[str, float | None]
    lacks: dict[str, str]
    device_bytes: dict[str, int]
    host_bytes: dict[str, int]
    choices: RaceResult
    fsdp2: float | None

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


def configuration_of(row: PublishedRow) -> Configuration:
    """Return the configuration of a row."""
    return Configuration(MACHINES[row.machine], MODELS[row.model], row.ranks, row.batch)


def elixir_row(published: PublishedRow) -> ElixirRow:
    """Simulate one row."""
    c = configuration_of(published)
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
    )


def sharding_problem(c: Configuration) -> ShardingProblem:
    """Describe a configuration for FSDP2: all of the memory that can be used, updates as fast as Elixir's."""
    machine = c.parallel
    host_updates = machine.host_updates_per_s * c.machine.constants.host_share
    machine = replace(machine, host_updates_per_s=host_updates)
    return ShardingProblem(c.groups, machine, machine.device_bytes, machine.host_bytes, fixed_bytes=DRIVER_BYTES)


def _tflops(value: float | None) -> str:
    return "out of memory" if value is None else f"{value:.0f}"
