"""Measures how far plans are from the bound, model by model; each budget is kept as soon as it is done."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stowage.flows.benchmarks.proven.cases import LABELS, NAMES, ProvenCase
from stowage.flows.benchmarks.proven.cells import Cell, Prover
from stowage.flows.benchmarks.proven.eviction import MODELS as MODELS_WITH_EVICTION
from stowage.flows.benchmarks.proven.eviction import eviction_rows
from stowage.flows.benchmarks.proven.others import MeasuredPoint, measured_points
from stowage.flows.benchmarks.proven.planning import planning_row
from stowage.stages.ir.errors import ParameterError
from stowage.stages.ir.files import write_atomically
from stowage.stages.solve.cuts.statement import contradictions_are_errors

SMALLEST = "smallest"
MEASURED = "measured"
PLANNING = "planning"
EVICTION = "eviction"
BUDGETS = ("65%", "50%", "30%", SMALLEST, MEASURED, PLANNING, EVICTION)
"""What is measured: plans within shares, within the smallest budget for which our rules find one, and within the peaks
that were measured of others; how long planning takes; and what greedy eviction adds, of some models."""


def run_proven(
    out: Path,
    pages: Path,
    say: Callable[[str], None],
    models: str = "",
    budgets: str = "",
    *,
    size: str = "small",
    anew: bool = False,
) -> str:
    """Measure the cells that are asked for; those that an earlier run has finished are not repeated.

    Args:
        out: the folder of results.
        pages: the folder of measured pages, which has others' points.
        say: receives each cell as a sentence.
        models: some of `NAMES`, with commas; by default all.
        budgets: some of `BUDGETS`, with commas; by default all.
        size: `small`, or `tiny` to try it out.
        anew: measure also what is there.

    Raises:
        ParameterError: there is no such model or budget.
    """
    wanted = _named("model", models, NAMES)
    asked = _named("budget", budgets, BUDGETS)
    points = measured_points(pages)
    folder = out / "proven"
    for name in wanted:
        label = LABELS[name]
        missing = [b for b in asked if anew or not _path(folder, name, b).is_file()]
        missing = [b for b in missing if b != EVICTION or name in MODELS_WITH_EVICTION]
        if not missing:
            continue
        # Plans are made anew, so that it is known how long that takes.
        shutil.rmtree(folder / "stores" / "solved", ignore_errors=True)
        case = ProvenCase(name, folder / "stores", size)
        prover = Prover(label, case)
        for budget in missing:
            if budget == PLANNING:
                row = planning_row(label, case)
                write_atomically(_path(folder, name, budget), json.dumps([asdict(row)], indent=1).encode())
                say(f"{label}: planned in {row.without_s:.2f} s without, and {row.with_s:.2f} s with what is proven")
                continue
            if budget == EVICTION:
                rows = eviction_rows(label, case)
                write_atomically(_path(folder, name, budget), json.dumps([asdict(r) for r in rows], indent=1).encode())
                say(f"{label}: planned with and without greedy eviction within {len(rows)} budgets")
                continue
            with contradictions_are_errors():
                cells = _cells(prover, case, budget, points.get(label, []))
            write_atomically(_path(folder, name, budget), json.dumps([asdict(c) for c in cells], indent=1).encode())
            for cell in cells:
                say(_sentence(cell))
    return f"{len(kept_cells(out))} cells"


def kept_cells(out: Path) -> list[dict[str, Any]]:
    """Return the cells of all runs, in the order of models and budgets."""
    return _kept(out, [budget for budget in BUDGETS if budget not in (PLANNING, EVICTION)])


def kept_planning(out: Path) -> list[dict[str, Any]]:
    """Return how long planning takes, of all runs."""
    return _kept(out, [PLANNING])


def kept_eviction(out: Path) -> list[dict[str, Any]]:
    """Return what greedy eviction adds, of all runs."""
    return _kept(out, [EVICTION])


def _kept(out: Path, budgets: Sequence[str]) -> list[dict[str, Any]]:
    paths = [_path(out / "proven", name, budget) for name in NAMES for budget in budgets]
    return [row for path in paths if path.is_file() for row in json.loads(path.read_text(encoding="utf-8"))]


def _cells(prover: Prover, case: ProvenCase, budget: str, points: Sequence[MeasuredPoint]) -> list[Cell]:
    if budget == MEASURED:
        return [cell for p in points for cell in prover.measured(p.who, p.peak_bytes, p.overhead)]
    if budget == SMALLEST:
        return prover.cells(budget, prover.smallest_bytes())
    return prover.cells(budget, case.budget_bytes(float(budget.removesuffix("%")) / 100))


def _path(folder: Path, name: str, budget: str) -> Path:
    return folder / f"{name}-{budget.removesuffix('%')}.json"


def _named(what: str, given: str, known: Sequence[str]) -> list[str]:
    found = [name for name in given.split(",") if name] or list(known)
    for name in found:
        if name not in known:
            raise ParameterError(f"There is no {what} {name!r} in this benchmark: write some of {', '.join(known)}.")
    return found


def _sentence(cell: Cell) -> str:
    if cell.budget_bytes < 0:
        return f"{cell.model}, {cell.budget}: none fits"
    return f"{cell.model}, {cell.budget}, {cell.who}: {cell.over_bound:.4f} × the bound ({cell.status})"
