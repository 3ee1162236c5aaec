"""Judges choices for groups as sharded plans, beside the plan that is made of everything: one simulator for all."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from stowage.flows.benchmarks.elixir.engines import Configuration
from stowage.flows.benchmarks.elixir.machines import MACHINES
from stowage.flows.benchmarks.elixir.models import MODELS
from stowage.flows.benchmarks.elixir.plan_b import case_of, lowered_times
from stowage.flows.benchmarks.elixir.rows import ElixirRow, sharding_problem


def plan_b_rows(rows: Iterable[ElixirRow], columns: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Judge the choices for the groups of each row that has a sharded plan as plans.

    Args:
        rows: simulated rows of the paper's tables.
        columns: contestants of the race -> column.
    """
    for row in (r for r in rows if r.plan_b is not None):
        p = row.published
        c = Configuration(MACHINES[p.machine], MODELS[p.model], p.ranks, p.batch)
        problem = sharding_problem(c)
        with tempfile.TemporaryDirectory() as stores:
            case = case_of(c, problem.machine, problem.device_budget, Path(stores))
            lowered = lowered_times(case, {k.name: k.choices for k in row.choices.contestants})
        yield {
            "machine": p.machine,
            "model": p.model,
            "ranks": p.ranks,
            "plan": _words(c.model.flops(p.batch) / row.plan_b / 1e12 if row.plan_b else None),
            **{column: _words(lowered.get(name)) for name, column in columns.items()},
            "on_fsdp2": _words(row.choices.best.judged.time_s if row.choices.best else None),
        }


def _words(seconds: float | None) -> str:
    return "OOM" if seconds is None else f"{seconds:.2f} s"
