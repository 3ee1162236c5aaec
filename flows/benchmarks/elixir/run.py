"""Simulates all tables, and writes their rows as the page's data."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stowage.flows.benchmarks.elixir.engines import ENGINES, Configuration
from stowage.flows.benchmarks.elixir.figure import plan_time_figure
from stowage.flows.benchmarks.elixir.judgement import fits_rows, judged_rows, missed_rows, speedups
from stowage.flows.benchmarks.elixir.kept import Kept
from stowage.flows.benchmarks.elixir.machines import MACHINES, P4D, PCIE, SXM
from stowage.flows.benchmarks.elixir.models import MODELS
from stowage.flows.benchmarks.elixir.plan_cells import PlanCell, PlanCells
from stowage.flows.benchmarks.elixir.plan_time import RANKS, plan_times
from stowage.flows.benchmarks.elixir.published import PublishedRow, best_of_deepspeed
from stowage.flows.benchmarks.elixir.rows import (
    EFFORT,
    ElixirRow,
    configuration_of,
    elixir_rows,
    sharding_problem,
    speedup,
)
from stowage.flows.planning.sharding import plan_groups
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


def run_elixir(out: Path, say: Callable[[str], None], batches: Collection[int]) -> str:
    """Simulate everything and write it into a folder.

    Args:
        out: the folder, which keeps what an earlier run has planned there.
        say: receives a line for each piece of work.
        batches: batches for which steps are planned as a whole.

    Returns:
        the judgement, in a few lines for people.
    """
    rows = list(elixir_rows(say))
    kept = Kept(out / "elixir_cells")
    planned = list(zip(rows, planned_cells(rows, PlanCells(kept, say), batches), strict=True))
    times = list(plan_times(kept, say))
    tables = {
        "elixir_within": judged_rows(rows),
        "elixir_speedups": list(_speedups(rows)),
        "elixir_fits": fits_rows(rows),
        "elixir_missed": missed_rows(rows),
        "elixir_7": [_full(row, cell) for row, cell in planned if row.published.machine == SXM.name],
        "elixir_8": [_full(row, cell) for row, cell in planned if row.published.machine == PCIE.name],
        "elixir_2": [_short(row) for row in rows if row.published.batch == 8],
        "elixir_3": [_short(row) for row in rows if row.published.ranks == 4 and row.published.batch != 8],
        "elixir_choices": [_choices(row) for row in rows if row.published.batch == 8],
        "elixir_plan_b": [_planned(row, cell) for row, cell in planned if cell and cell.batch == 8],
        "elixir_ranks": list(_scaling()),
        "elixir_plan_time": [asdict(found) for found in times],
        "elixir_constants": [{"machine": m.name, **asdict(m.constants)} for m in MACHINES.values()],
    }
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / "elixir.json", (json.dumps(tables, indent=1) + "\n").encode())
    plan_time_figure(times).savefig(out / "elixir_plan_time.png", dpi=120)
    return _summary(tables)


def planned_cells(rows: Sequence[ElixirRow], cells: PlanCells, batches: Collection[int]) -> list[PlanCell | None]:
    """Plan the rows of some batches as a whole, those of Table 2 first; of others return what is there already."""
    found: dict[int, PlanCell | None] = {}
    for at, row in sorted(enumerate(rows), key=lambda numbered: numbered[1].published.batch != 8):
        choices = {k.name: k.choices for k in row.choices.contestants}
        c = configuration_of(row.published)
        found[at] = cells.of(c, choices) if c.batch in batches else cells.kept(c)
    return [found[at] for at in range(len(rows))]


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


def _full(row: ElixirRow, cell: PlanCell | None) -> dict[str, Any]:
    p, flops = row.published, configuration_of(row.published).model.flops(row.published.batch)
    cells = {e: _cell(row, e) for e in ("elixir", "fsdp", "zero_2", "zero_3", "zero_2_offload", "zero_3_offload")}
    return {
        "model": p.model,
        "ranks": p.ranks,
        "batch": f"{p.batch}{' †' if row.fitted else ''}",
        **cells,
        "speedup": {"simulated": speedup(row.simulated), "published": speedup(p.tflops)},
        "ddp": _words(row.simulated["ddp"]),
        "fsdp2": _words(row.fsdp2),
        "plan_b": "" if cell is None else _words(flops / cell.plan_s / 1e12 if cell.plan_s else None),
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


def _planned(row: ElixirRow, cell: PlanCell) -> dict[str, Any]:
    p, best = row.published, row.choices.best
    return {
        "machine": p.machine,
        "model": p.model,
        "ranks": p.ranks,
        "plan": _seconds(cell.plan_s),
        **{column: _seconds(cell.groups_s[name]) for name, column in POLICIES.items()},
        "on_fsdp2": _seconds(best.judged.time_s if best else None),
    }


def _seconds(seconds: float | None) -> str:
    return "OOM" if seconds is None else f"{seconds:.2f} s"


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


def _scaling() -> Iterator[dict[str, Any]]:
    for machine in (*MACHINES.values(), P4D):
        for ranks in RANKS:
            c = Configuration(machine, MODELS["GPT2-20b"], ranks, 8)
            best = plan_groups(sharding_problem(c), EFFORT).best
            found = {engine: _words(c.tflops(simulate(c))) for engine, simulate in ENGINES.items()}
            fsdp2 = c.model.flops(c.batch) / best.judged.time_s / 1e12 if best else None
            yield {"machine": machine.name, "ranks": ranks, **found, "fsdp2": _words(fsdp2)}


def _words(tflops: float | None) -> str:
    return "OOM" if tflops is None else f"{tflops:.0f}"
