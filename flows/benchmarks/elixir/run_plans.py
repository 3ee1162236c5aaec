"""Plans the steps of the paper's cells as a whole, and adds them to Tables 7 and 8."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stowage.flows.benchmarks.elixir.figure import plan_time_figure
from stowage.flows.benchmarks.elixir.kept import Kept
from stowage.flows.benchmarks.elixir.machines import PCIE, SXM
from stowage.flows.benchmarks.elixir.plan_cells import CELLS, PlanCell, PlanCells
from stowage.flows.benchmarks.elixir.published import PublishedRow, published_rows
from stowage.flows.benchmarks.elixir.rows import configuration_of
from stowage.flows.benchmarks.elixir.run import POLICIES
from stowage.flows.benchmarks.elixir.scaling import scaling_configurations, scaling_rows
from stowage.flows.benchmarks.elixir.step_time import step_times
from stowage.flows.benchmarks.pages.measurement import read_measurement
from stowage.stages.ir.files import write_atomically

Rows = Sequence[Mapping[str, Any]]

TABLES = {"elixir_7": SXM.name, "elixir_8": PCIE.name}

EARLIER = " ‡"
"""Marks a model in a row that was published before."""

SHOWN_BATCH = 8
"""The batch of Table 2, for which all ways to choose for groups are shown."""


def run_elixir_plans(
    out: Path, say: Callable[[str], None], batches: Collection[int], pages: Path | None, *, times: bool
) -> str:
    """Plan cells and write them into a folder; what an earlier run has planned there is not planned again.

    A run that is interrupted writes what is planned by then; tables of which nothing is planned stay as published.

    Args:
        out: the folder.
        say: receives a line for each step that is planned.
        batches: batches of the cells that are planned; others are shown as far as they are there.
        pages: the folder of pages, whose Tables 7 and 8 get a column more.
        times: plan for the table of planning time too.

    Returns:
        a line for people.
    """
    kept = Kept(out / CELLS)
    rows, known = list(published_rows()), PlanCells(kept, say)
    try:
        planned_cells(rows, known, batches)
        if SHOWN_BATCH in batches:
            for c in scaling_configurations():
                known.of(c)
        list(step_times(kept, say, anew=times))
    except KeyboardInterrupt:
        say("Cut off: written is what is planned so far; the same command goes on.")
    cells, timed = planned_cells(rows, known, ()), list(step_times(kept, anew=False))
    tables: dict[str, Rows] = {}
    if timed:
        tables["elixir_step_time"] = [asdict(found) for found in timed]
    if shown := [_row(cell) for cell in cells if cell.batch == SHOWN_BATCH]:
        tables["elixir_plan_b"] = shown if pages is None else with_earlier(shown, _published(pages, "elixir_plan_b"))
    if any(known.kept(c) for c in scaling_configurations()):
        tables["elixir_ranks"] = scaling_rows(known)
    if pages is not None:
        for section, machine in TABLES.items():
            mine = [cell for cell in cells if cell.machine == machine]
            tables[section] = with_plans(_published(pages, section), mine)
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / "elixir_plans.json", (json.dumps(tables, indent=1) + "\n").encode())
    if timed:
        plan_time_figure(timed).savefig(out / "elixir_step_time.png", dpi=120)
    return f"{len(cells)} cells and {len(timed)} other steps are planned."


def planned_cells(rows: Sequence[PublishedRow], cells: PlanCells, batches: Collection[int]) -> list[PlanCell]:
    """Plan the rows of some batches as a whole, those of Table 2 first; of others return what is there already."""
    found: dict[int, PlanCell | None] = {}
    for at, row in sorted(enumerate(rows), key=lambda numbered: numbered[1].batch != SHOWN_BATCH):
        c = configuration_of(row)
        found[at] = cells.of(c) if c.batch in batches else cells.kept(c)
    return [cell for at in range(len(rows)) if (cell := found[at]) is not None]


def with_plans(rows: Rows, cells: Sequence[PlanCell]) -> Rows:
    """Return the rows of Table 7 or 8 with the TFLOPS of plans; cells that are not planned stay as published."""
    words = {(cell.model, cell.ranks, cell.batch): cell.words for cell in cells}

    def of(row: Mapping[str, Any]) -> str:
        name = row["model"], row["ranks"], int(str(row["batch"]).split()[0])
        return words.get(name, str(row.get("plan_b", "")))

    return [{**row, "plan_b": of(row)} for row in rows]


def with_earlier(rows: Rows, published: Rows) -> Rows:
    """Return the rows with those that were published before of cells that are not planned yet, which get a mark."""
    found = {_key(row): row for row in rows}
    for row in published:
        if _key(row) not in found:
            found[_key(row)] = {**row, "model": _key(row)[1] + EARLIER}
    order = [(row.machine, row.model, row.ranks) for row in published_rows() if row.batch == SHOWN_BATCH]
    return sorted(found.values(), key=lambda row: order.index(_key(row)))


def _key(row: Mapping[str, Any]) -> tuple[str, str, int]:
    return str(row["machine"]), str(row["model"]).removesuffix(EARLIER), int(row["ranks"])


def _published(pages: Path, section: str) -> Rows:
    path = pages / "data" / f"{section}.json"
    return read_measurement(path).rows if path.is_file() else []


def _row(cell: PlanCell) -> dict[str, Any]:
    return {
        "machine": cell.machine,
        "model": cell.model,
        "ranks": cell.ranks,
        "plan": _seconds(cell.plan_s),
        **{column: _seconds(cell.groups_s[name]) for name, column in POLICIES.items()},
        "on_fsdp2": _seconds(cell.on_fsdp2_s),
    }


def _seconds(seconds: float | None) -> str:
    return "OOM" if seconds is None else f"{seconds:.2f} s"
