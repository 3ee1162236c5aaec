"""Runs the command's own steps on a small model: measure, plan where a solver is, train, and plain PyTorch."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stowage.flows.benchmarks.gpu.carried import MEASURED, PLANNED, is_planned
from stowage.flows.benchmarks.gpu.job import GpuJob
from stowage.flows.benchmarks.gpu.measure import measure_job
from stowage.flows.benchmarks.gpu.race import CHROME_TRACE, like, race
from stowage.flows.benchmarks.gpu.steps import StepAnswer
from stowage.flows.benchmarks.gpu.table import GpuRow, text_of

SOLVERS = ("pulp", "highspy", "ortools")
"""Packages that planning needs, and that a machine that only trains lacks."""

SPARE_S = 10.0
"""Seconds of a step's limit that are kept for what follows its contestants."""


class Told:
    """Prints texts, and remembers them."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def __call__(self, text: str) -> None:
        """Print a text, and remember it."""
        print(text, flush=True)
        self.lines.append(text)


def measure(asked: dict[str, Any]) -> StepAnswer:
    """Measure rates, trace and costs."""
    told = Told()
    job = GpuJob(**asked["job"] | {"host_bytes": asked["host_bytes"]})
    measure_job(
        job,
        Path(asked["folder"]),
        told,
        seconds_per_call=asked["seconds_per_call"],
        min_samples=asked["min_samples"],
    )
    size = (Path(asked["folder"]) / MEASURED).stat().st_size
    return StepAnswer("held", numbers={"rates": told.lines[0], "bytes to carry": size}, lines=tuple(told.lines))


def why_no_plan() -> str:
    """Say what this machine lacks for planning; empty where it lacks nothing."""
    missing = [name for name in SOLVERS if importlib.util.find_spec(name) is None]
    if missing:
        return f"{', '.join(missing)} cannot be imported here"
    try:
        importlib.import_module("stowage.flows.benchmarks.gpu.plan")
    except ImportError as error:
        return f"planning cannot be imported here ({error})"
    return ""


def what_to_carry(folder: Path, why: str) -> str:
    """Say what people do where this machine cannot plan."""
    return (
        f"{why}: carry {folder / MEASURED} to a machine that plans, run `python -m stowage.flows.gpu plan --out "
        f"FOLDER` there, bring FOLDER/{PLANNED} back to {folder}, and give the same call again"
    )


def plan(asked: dict[str, Any]) -> StepAnswer:
    """Plan here, or take the plans that were carried here."""
    folder = Path(asked["folder"])
    if not (folder / MEASURED).is_file():
        return StepAnswer("not run", "nothing was measured before")
    why = why_no_plan()
    if why:
        if is_planned(folder):
            return StepAnswer("held", lines=(f"{folder / PLANNED} was carried here",))
        return StepAnswer("not run", what_to_carry(folder, why))
    from stowage.flows.benchmarks.gpu.plan import plan_job
    from stowage.flows.planning.step import QUICK

    told = Told()
    stores = folder / "stores"
    plan_job(folder, told, fractions=asked["fractions"], method=asked["method"], stores=stores, effort=QUICK)
    return StepAnswer("held", lines=tuple(told.lines))


def train(asked: dict[str, Any]) -> StepAnswer:
    """Train the contestants that are asked for."""
    folder = Path(asked["folder"])
    if not is_planned(folder):
        return StepAnswer("not run", f"{folder / PLANNED} is not there yet, or is of another measuring")
    told = Told()
    timeout_s = max(10.0, asked["limit_s"] - SPARE_S)
    rows = race(folder, told, steps=asked["steps"], only=asked["only"], timeout_s=timeout_s)
    names = like([row.contestant for row in rows], asked["only"])
    chosen = [row for row in rows if row.contestant in names]
    print(text_of(rows), flush=True)
    numbers: dict[str, Any] = {row.contestant: peaks_of(row) for row in chosen}
    wrong = _wrong(chosen)
    if asked["traced"] and not wrong and not (folder / CHROME_TRACE).is_file():
        wrong.append(f"{folder / CHROME_TRACE} was not written")
    if wrong:
        return StepAnswer("fell", "; ".join(wrong), numbers)
    return StepAnswer("held", numbers=numbers, lines=tuple(_line(row) for row in chosen))


def peaks_of(row: GpuRow) -> dict[str, Any]:
    """Return a contestant's peaks, times and clocks for the page."""
    return {
        "requested": row.requested_bytes,
        "allocated": row.peak_bytes,
        "reserved": row.reserved_bytes,
        "retries": row.retries,
        "out of memory": row.out_of_memory,
        "limit": row.limit_bytes,
        "step, seconds": row.time_s,
        "predicted, seconds": row.predicted_time_s,
        "spread": row.spread,
        "clocks": row.clocks,
        "note": row.note,
    }


def _wrong(rows: Sequence[GpuRow]) -> list[str]:
    if not rows:
        return ["nobody ran"]
    found = [f"{row.contestant}: {row.note}" for row in rows if not row.losses]
    found += [
        f"{row.contestant} took {row.peak_bytes} bytes of its {row.limit_bytes}"
        for row in rows
        if 0 <= row.limit_bytes < row.peak_bytes
    ]
    return found


def _line(row: GpuRow) -> str:
    retries = f", {row.retries} retries" if row.retries >= 0 else ""
    return f"{row.contestant}: {row.time_s:.3f} s a step, peak {row.peak_bytes / 1e9:.2f} GB{retries}"
