"""Runs the race from start to end: measure, plan, train, for each type of weights and once for equality alone.

Whatever is finished is not done again, and where this machine cannot plan, it says what to carry and continues when
that is there.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stowage.flows.benchmarks.gpu.carried import MEASURED, carried_job, is_planned
from stowage.flows.benchmarks.gpu.first.chain import what_to_carry, why_no_plan
from stowage.flows.benchmarks.gpu.job import GpuJob, layers_of, parameters_of
from stowage.flows.benchmarks.gpu.measure import Say
from stowage.flows.benchmarks.gpu.process import answer_of, run_process
from stowage.flows.benchmarks.gpu.race import ALLOCATOR, race
from stowage.flows.benchmarks.gpu.steps import PROCESS
from stowage.flows.benchmarks.gpu.table import GpuRow, markdown_of, noise_text, text_of
from stowage.stages.ir.errors import Infeasible, ParameterError, StowageError
from stowage.stages.ir.files import write_atomically

PAGE = "race.md"
STRICT_LAYERS = 8
"""Layers of the job that is about equality: it must fit a card without a limit too."""

STRICT_LIMIT = 0.5
"""Least share of the limit for a smaller model: it has to offload too, and its activations do not shrink with it."""

MEASURE_S = 1800.0
"""Seconds that measuring may take."""

FLATTERED = (
    "float32 without TF32: matrix products take several times as long as those of bfloat16 while copies take twice as "
    "long, so this table flatters everyone who offloads"
)


@dataclass(frozen=True)
class RaceEffort:
    """Limits on the time that things may take.

    Attributes:
        steps: timed iterations of each contestant.
        seconds_per_call: seconds to spend on measuring each distinct call.
        min_samples: samples of each distinct call at least.
        quick: plan in seconds, less well.
        timeout_s: seconds that one contestant may take.
        budget_s: seconds of the whole call; nothing is started afterwards.
    """

    steps: int
    seconds_per_call: float
    min_samples: int
    quick: bool = False
    timeout_s: float = 540.0
    budget_s: float = math.inf


@dataclass(frozen=True)
class Raced:
    """The result of a call.

    Attributes:
        tables: rows of each job that was trained, by its name.
        missing: what keeps the race from its end, one sentence each.
    """

    tables: dict[str, list[GpuRow]]
    missing: list[str]


def jobs_of(job: GpuJob, dtypes: Sequence[str], *, strict: bool = True) -> dict[str, GpuJob]:
    """Return one job for each type, and a strict one of the first with fewer layers; by the names of their folders."""
    found = {dtype: replace(job, dtype=dtype) for dtype in dtypes}
    return found | ({"strict": strict_of(replace(job, dtype=dtypes[0]))} if strict else {})


def strict_of(job: GpuJob) -> GpuJob:
    """Return a job with kernels that repeat bit for bit, and with so few layers that a card holds all of it."""
    layers = layers_of(job)
    few = min(STRICT_LAYERS, layers)
    if few == layers:
        return replace(job, strict=True)
    fewer = replace(job, overrides=job.overrides | {"num_hidden_layers": few}, strict=True)
    share = max(STRICT_LIMIT, parameters_of(fewer) / parameters_of(job))
    return replace(fewer, limit_bytes=int(share * job.limit_bytes))


def run_race(
    jobs: Mapping[str, GpuJob],
    out: Path,
    say: Say,
    effort: RaceEffort,
    *,
    fractions: Sequence[float],
    method: str,
    stores: Path,
    only: Sequence[str] = (),
    again: Collection[str] = (),
    allocator: str = ALLOCATOR,
) -> Raced:
    """Do what is not done yet, and write `race.md` in `out` after each job.

    Args:
        jobs: jobs by the names of their folders in `out`.
        out: folder of everything.
        say: receives what people should know.
        effort: limits on the time.
        fractions: see `plan_job`.
        method: see `plan_job`.
        stores: see `plan_job`.
        only: contestants whose names contain one of these; by default all.
        again: `measure`, `plan`, or parts of names of contestants: done again. `all` is everything, `fell` those that
            died, failed or took too long.
        allocator: see `race`.

    Raises:
        StowageError: a file is of another job, or damaged; measuring failed.
    """
    until = time.monotonic() + effort.budget_s
    everything = "all" in again
    missing: list[str] = []
    for name, job in jobs.items():
        if not everything and "measure" not in again and _is_measured(job, out / name):
            say(f"{name}: measured before")
        elif time.monotonic() > until:
            missing.append(f"{name}: the time was used up before measuring")
        elif not _measure(name, job, out / name, say, effort, until):
            missing.append(f"{name}: the time was used up while measuring")
    for name in jobs:
        if (out / name / MEASURED).is_file():
            missing += _plan(name, out / name, say, effort, fractions, method, stores, everything or "plan" in again)
    tables: dict[str, list[GpuRow]] = {}
    if missing:
        for text in missing:
            say(text)
        _write_page(out, jobs, tables, missing)
        return Raced(tables, missing)
    repeated = [""] if everything else [part for part in again if part not in ("measure", "plan")]
    for name in jobs:
        say(f"{name}: {jobs[name].name()}")
        tables[name] = race(
            out / name,
            lambda text, name=name: say(f"{name}: {text}"),  # type: ignore[misc]
            steps=effort.steps,
            only=only,
            timeout_s=effort.timeout_s,
            allocator=allocator,
            again=repeated,
            until=until,
        )
        if time.monotonic() > until and not missing:
            missing.append("The time was used up: the same call again goes on.")
        _write_page(out, jobs, tables, missing)
    return Raced(tables, missing)


def _is_measured(job: GpuJob, folder: Path) -> bool:
    """Return whether the folder's measurements are of this very job; the host's free memory does not count."""
    if not (folder / MEASURED).is_file():
        return False
    there = carried_job(folder / MEASURED)
    if replace(there, host_bytes=0) != replace(job, host_bytes=0):
        raise ParameterError(
            f"{folder / MEASURED} is of another job ({there.name()}, limit {there.limit_bytes / 1e9:g} GB) than the "
            f"one asked for ({job.name()}, limit {job.limit_bytes / 1e9:g} GB): give another --out, or --again measure."
        )
    return True


def _measure(name: str, job: GpuJob, folder: Path, say: Say, effort: RaceEffort, until: float) -> bool:
    """Measure in a process of its own, whose device memory is free afterwards; return False where time is up first."""
    folder.mkdir(parents=True, exist_ok=True)
    request, answer, log = (folder / f"measure.{kind}" for kind in ("request", "answer", "log"))
    say(f"{name}: measuring {job.name()} ({log} says how far it is) …")
    answer.unlink(missing_ok=True)
    asked: dict[str, Any] = {
        "kind": "measure",
        "job": vars(job),
        "host_bytes": job.host_bytes,
        "folder": str(folder),
        "seconds_per_call": effort.seconds_per_call,
        "min_samples": effort.min_samples,
        "repeats": job.strict,
    }
    write_atomically(request, json.dumps(asked).encode())
    left_s = max(0.0, until - time.monotonic())
    ended = run_process([*PROCESS, str(request), str(answer)], log, limit_s=min(MEASURE_S, left_s))
    if ended.code is None and left_s < MEASURE_S:
        return False
    found = answer_of(answer)
    if ended.code != 0 or found is None:
        raise StowageError(f"{name}: measuring {ended.why()} ({log} has all that it wrote).")
    for line in found["lines"]:
        say(f"{name}: {line}")
    request.unlink()
    answer.unlink()
    return True


def _plan(
    name: str,
    folder: Path,
    say: Say,
    effort: RaceEffort,
    fractions: Sequence[float],
    method: str,
    stores: Path,
    anew: bool,
) -> list[str]:
    """Plan what has no plan, if this machine can; return what is missing otherwise."""
    why = why_no_plan()
    if is_planned(folder) and not (anew and not why):
        say(f"{name}: planned before")
        return []
    if why:
        return [f"{name}: {what_to_carry(folder, why)}."]
    from stowage.flows.benchmarks.gpu.plan import plan_job
    from stowage.flows.planning import step as _planning

    try:
        plan_job(
            folder,
            lambda text: say(f"{name}: {text}"),
            fractions=fractions,
            method=method,
            stores=stores,
            effort=_planning.QUICK if effort.quick else _planning.Effort(),
        )
    except Infeasible as infeasible:
        return [f"{name}: {infeasible}"]
    return []


def report_of(jobs: Mapping[str, GpuJob], tables: Mapping[str, list[GpuRow]]) -> str:
    """Return all tables for a terminal, each with notes on how to read it."""
    parts = [
        "\n".join([jobs[name].name(), *(f"  {note}" for note in notes_of(jobs[name], rows)), text_of(rows)])
        for name, rows in tables.items()
    ]
    return "\n\n".join(parts)


def notes_of(job: GpuJob, rows: list[GpuRow]) -> list[str]:
    """Return notes that one needs to read a table."""
    found = [noise_text(rows)]
    if job.dtype == "float32" and not job.strict:
        found.append(FLATTERED)
    if job.strict:
        found.append(
            "strict: deterministic kernels in tracing, measuring and training; losses and weights must be equal"
        )
    else:
        found.append(
            "of the peers only FSDP2 and ZeRO-3 stream weights; the others keep them all on the device and cannot be "
            "held to a limit below that"
        )
    return [text for text in found if text]


def about_of(row: GpuRow) -> str:
    """Say of a contestant what the table has no room for."""
    parts = [f"ready after {row.prepare_s:.0f} s"]
    if row.pin_s > 0:  # NaN where pinning is not counted
        parts.append(f"{row.pin_s:.0f} s of it for pinning host memory")
    if row.timed_retries > 0:
        parts.append(f"{row.timed_retries} retries of the allocator in timed steps")
    if row.clocks:
        parts.append(f"clocks {row.clocks}")
    return ", ".join(parts)


def _write_page(
    out: Path, jobs: Mapping[str, GpuJob], tables: Mapping[str, list[GpuRow]], missing: Sequence[str]
) -> None:
    lines = ["# The race", ""]
    for text in missing:
        lines += [f"- {text}"]
    for name, rows in tables.items():
        job = jobs[name]
        lines += ["", f"## {name}: {job.name()}, {job.limit_bytes / 1e9:g} GB", ""]
        lines += [*(f"- {note}" for note in notes_of(job, rows)), "", markdown_of(rows), ""]
        lines += [f"- {row.contestant}: {about_of(row)}" for row in rows if row.prepare_s > 0]
    write_atomically(out / PAGE, ("\n".join(lines).strip() + "\n").encode())
