"""Simulates all tables, and writes their rows as the page's data."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stowage.flows.benchmarks.elixir.figure import plan_time_figure
from stowage.flows.benchmarks.elixir.judgement import fits_rows, judged_rows, missed_rows, speedups
from stowage.flows.benchmarks.elixir.kept import Kept
from stowage.flows.benchmarks.elixir.machines import MACHINES, PCIE, SXM
from stowage.flows.benchmarks.elixir.plan_cells import CELLS, PlanCells
from stowage.flows.benchmarks.elixir.plan_time import plan_times
from stowage.flows.benchmarks.elixir.published import PublishedRow, best_of_deepspeed
from stowage.flows.benchmarks.elixir.rows import (
    ElixirRow,
    configuration_of,
    elixir_rows,
    speedup,
)
from stowage.flows.benchmarks.elixir.scaling import tflops_words
from stowage.stages.formulations.sharding.race import RaceResult
from stowage.stages.ir.files import write_atomically

Rows = list[dict[str, Any]]

POLICIES = {
    "exact": "exact",
    "greedy": "greedy",
    "ZeRO-2": "zero_2",
    "ZeRO-3": "zero_3",
    "ZeRO-2 offloaded": "zero_2_offload",
    "ZeRO-3 offloaded": "zero_3_offload",
}
"""Contestants of the race by column."""


def run_elixir(out: Path, say: Callable[[str], None]) -> str:
    """Simulate everything and write it into a folder.

    Returns:
        the judgement, in a few lines for people.
    """
    rows = list(elixir_rows(say))
    cells = PlanCells(Kept(out / CELLS))
    times = list(plan_times(say))
    tables = {
        "elixir_within": judged_rows(rows),
        "elixir_speedups": list(_speedups(rows)),
        "elixir_fits": fits_rows(rows),
        "elixir_missed": missed_rows(rows),
        "elixir_7": [_full(row, cells) for row in rows if row.published.machine == SXM.name],
        "elixir_8": [_full(row, cells) for row in rows if row.published.machine == PCIE.name],
        "elixir_2": [_short(row) for row in rows if row.published.batch == 8],
        "elixir_3": [_short(row) for row in rows if row.published.ranks == 4 and row.published.batch != 8],
        "elixir_choices": [_choices(row) for row in rows if row.published.batch == 8],
        "elixir_plan_time": [asdict(found) for found in times],
        "elixir_constants": [{"machine": m.name, **asdict(m.constants)} for m in MACHINES.values()],
    }
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / "elixir.json", (json.dumps(tables, indent=1) + "\n").encode())
    plan_time_figure(times).savefig(out / "elixir_plan_time.png", dpi=120)
    return _summary(tables)


def _summary(tables: dict[str, Rows]) -> str:
    everything = tables["elixir_within"][-1]
    agree, cells = (sum(row[key] for row in tables["elixir_fits"]) for key in ("agree", "cells"))
    lines = [
        f"{everything['judged_within']} of {everything['judged']} cells that were not fitted to are within 20%.",
        f"{agree} of {cells} cells agree on who fits.",
        *(f"{r['machine']}, {r['configuration']}: {r['simulated']:.2f} ×" for r in tables["elixir_speedups"]),
    ]
    return "\n".join(lines)


def _cell(row: ElixirRow, engine: str) -> dict[str, float | None]:
    return {"simulated": row.simulated[engine], "published": row.published.tflops.get(engine)}


def _full(row: ElixirRow, planned: PlanCells) -> dict[str, Any]:
    p, cell = row.published, planned.kept(configuration_of(row.published))
    cells = {e: _cell(row, e) for e in ("elixir", "fsdp", "zero_2", "zero_3", "zero_2_offload", "zero_3_offload")}
    return {
        "model": p.model,
        "ranks": p.ranks,
        "batch": f"{p.batch}{' †' if row.fitted else ''}",
        **cells,
        "speedup": {"simulated": speedup(row.simulated), "published": speedup(p.tflops)},
        "ddp": tflops_words(row.simulated["ddp"]),
        "fsdp2": tflops_words(row.fsdp2),
        "plan_b": "" if cell is None else cell.words,
    }


def _short(row: ElixirRow) -> dict[str, Any]:
    p = row.published
    return {
        "machine": p.machine,
        "ranks": p.ranks,
        "model": p.model,
        "batch": str(p.batch),
        "elixir": _cell(row, "elixir"),
        "fsdp": _cell(row, "fsdp"),
        "deepspeed": {"simulated": best_of_deepspeed(row.simulated), "published": best_of_deepspeed(p.tflops)},
    }


def _choices(row: ElixirRow) -> dict[str, Any]:
    found = dict.fromkeys(POLICIES.values(), "–")
    for contestant in row.choices.contestants:
        words = f"{contestant.judged.time_s:.2f} s" if contestant.fits else "OOM"
        best = contestant is row.choices.best
        found[POLICIES[contestant.name]] = f"**{words}**" if best else words
    p = row.published
    return {"machine": p.machine, "model": p.model, "ranks": p.ranks, **found, "gap": _gap(row.choices)}


def _gap(result: RaceResult) -> float | None:
    return max(0.0, result.best.judged.time_s / result.bound_s - 1) if result.best and result.bound_s else None


def _speedups(rows: Sequence[ElixirRow]) -> Iterator[dict[str, Any]]:
    for machine in MACHINES:
        for by, (_, row) in speedups(rows, machine).items():
            p: PublishedRow = row.published
            yield {
                "machine": machine,
                "by": "the simulator" if by == "simulated" else "the paper",
                "configuration": f"{p.ranks} × {p.model}, batch {p.batch}",
                "simulated": speedup(row.simulated),
                "published": speedup(p.tflops),
            }
