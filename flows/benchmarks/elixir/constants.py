"""Fits the constants of a machine to a part of the published cells; all others judge them.

Fitted are five constants for each machine, on the cells of batch 8 with one and with four GPUs: a sixth of all. The sum
of |log(simulated / published)| is made smallest, one constant after the other, over a grid of steps of 2% and 0.05.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from stowage.flows.benchmarks.elixir.engines import ENGINES, Configuration
from stowage.flows.benchmarks.elixir.machines import MACHINES, Constants, ElixirMachine
from stowage.flows.benchmarks.elixir.models import MODELS
from stowage.flows.benchmarks.elixir.published import PublishedRow, published_rows

JUDGED = ("elixir", "zero_2", "zero_3", "zero_2_offload", "zero_3_offload")
"""Engines whose TFLOPS are fitted and judged."""

SHARES = ("matmul_flops", "host_share", "zero_2_share", "zero_3_share")
"""Constants that are multiplied in the search; the slowdown is added to."""


def is_fitted(row: PublishedRow) -> bool:
    """Return whether the cells of a row are fitted to."""
    return row.batch == 8 and row.ranks in (1, 4)


def fit(machine: ElixirMachine, rounds: int = 6) -> Constants:
    """Return the constants that fit a machine's cells best, beginning with those that it has."""
    rows = [row for row in published_rows() if row.machine == machine.name and is_fitted(row)]
    best = machine.constants
    error = _error(machine, best, rows)
    for _ in range(rounds):
        before = error
        for name in (*SHARES, "slowdown"):
            for constants in _near(best, name):
                found = _error(machine, constants, rows)
                if found < error:
                    best, error = constants, found
        if error == before:
            break
    return best


def _near(constants: Constants, name: str) -> list[Constants]:
    value = float(getattr(constants, name))
    values = [value * 1.02**k for k in range(-20, 21)] if name in SHARES else [0.05 * k for k in range(21)]
    return [replace(constants, **{name: v}) for v in values]


def _error(machine: ElixirMachine, constants: Constants, rows: Sequence[PublishedRow]) -> float:
    tried = replace(machine, constants=constants)
    total = 0.0
    for row in rows:
        c = Configuration(tried, MODELS[row.model], row.ranks, row.batch)
        for engine in JUDGED:
            published = row.tflops[engine]
            if published is not None:
                found = c.tflops(ENGINES[engine](c))
                total += abs(math.log(found / published)) if found else 0.0
    return total


def fit_all() -> dict[str, Constants]:
    """Fit every machine, from constants that say nothing."""
    return {name: fit(replace(machine, constants=Constants())) for name, machine in MACHINES.items()}
