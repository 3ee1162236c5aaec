"""Races on the machine with the GPU, the third step: every contestant in turn, each in its own process."""

from __future__ import annotations

import hashlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from stowage.flows.benchmarks.gpu.carried import PLANNED, unpack
from stowage.flows.benchmarks.gpu.contestant import ContestantResult, Request, request_text
from stowage.flows.benchmarks.gpu.job import CUBLAS_REPEATS, CUBLAS_SETTING, GpuJob, layers_of
from stowage.flows.benchmarks.gpu.measure import Say
from stowage.flows.benchmarks.gpu.process import run_process
from stowage.flows.benchmarks.gpu.table import EXTRAPOLATED, REFERENCE, REPEATED, GpuRow, extrapolate, rows_of
from stowage.stages.ir.errors import ParameterError
from stowage.stages.ir.table import read_record, record_of, write_record, write_rows

RESULTS, TABLE, CHROME_TRACE = "results.json", "table.parquet", "trace.json"
CONTESTANT = (sys.executable, "-X", "faulthandler", "-m", "stowage.flows.benchmarks.gpu.contestant")
"""Command of a contestant's process."""

LOOSER = 2.0
"""Multiple of the limit at which peers that keep all weights on the device are raced too."""

ALLOCATOR = "expandable_segments:True"
"""Allocator setting that loses next to nothing between tensors, so that a plan may use almost the whole limit."""

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Names of the allocator's settings, which are set alike: the second, older one wins in torch 2.11."""

STREAMS = "FSDP2, CPUOffloadPolicy"
PEERS = {
    "gradient checkpointing, optimizer in host memory": "host optimizer",
    STREAMS: "fsdp2",
    "DeepSpeed ZeRO-Offload": "zero-offload",
    "DeepSpeed ZeRO-3, offload": "zero-3",
}
LOOSE_PEERS = ("gradient checkpointing, optimizer in host memory", STREAMS)
"""Peers that are raced at the looser limit too."""

KEEP_WEIGHTS = ("host optimizer", "zero-offload")
"""Kinds of peers that can do without some of the device's memory, but not without the weights in it."""

LOG_LINES = 12

FELL = "fell"
STOPPED = "stopped"
FALLEN = ("died", "failed", STOPPED)
"""Beginnings of notes of contestants that did not finish; not fitting a limit, or not being installed, is finished."""


def few_layers(layers: int) -> tuple[int, int]:
    """Return the layers of the two models from which plain PyTorch is extrapolated: of 32 layers 8 and 16.

    Fewer amplify noise.
    """
    few = max(1, layers // 4)
    return few, 2 * few


def contestants(
    job: GpuJob, plans: Mapping[str, Path], steps: int, out: Path, scratch: Path, layers: int
) -> dict[str, Request]:
    """Return the requests of all contestants by name; of a strict job only plans, and plain PyTorch twice."""
    common = asdict(job)

    def request(
        kind: str,
        *,
        limited: bool = True,
        layers: int | None = None,
        plan: str = "",
        trace_file: str = "",
        limit_bytes: int = -1,
    ) -> Request:
        return Request(kind, common, steps, limited, layers, plan, str(scratch), trace_file, limit_bytes)

    found: dict[str, Request] = {}
    for number, (fraction, folder) in enumerate(plans.items()):
        trace_file = "" if number else str(out / CHROME_TRACE)
        found[f"Stowage at {float(fraction):.0%}"] = request("stowage", plan=str(folder), trace_file=trace_file)
    found[REFERENCE] = request("plain", limited=False)
    found[REPEATED] = request("plain", limited=False)
    if job.strict:
        return found
    for few in few_layers(layers):
        found[_fewer(few)] = request("plain", limited=False, layers=few)
    found |= {name: request(kind) for name, kind in PEERS.items()}
    loose = int(LOOSER * job.limit_bytes)
    return found | {f"{name}, {LOOSER:g} × the limit": request(PEERS[name], limit_bytes=loose) for name in LOOSE_PEERS}


def _fewer(layers: int) -> str:
    return f"plain PyTorch, {layers} layers"


def race(
    out: Path,
    say: Say,
    *,
    steps: int,
    only: Sequence[str] = (),
    timeout_s: float = 540.0,
    allocator: str = ALLOCATOR,
    again: Collection[str] | None = None,
    until: float | None = None,
) -> list[GpuRow]:
    """Read `planned.tar.gz` in `out`; write results, `table.parquet` and `trace.json` there, and return the table.

    Results of earlier calls stay, so that a long race can be run in parts.

    Args:
        out: folder of all files.
        say: receives what people should know.
        steps: iterations to time.
        only: contestants, see `like`; by default all.
        timeout_s: seconds that one contestant may take.
        allocator: setting of the contestants' allocator.
        again: skip contestants that have a result of the same request, except these, see `like`; `fell` stands for
            those that did not finish; None runs all that are chosen.
        until: at this `time.monotonic` the contestant under way is stopped, and has no result.

    Raises:
        StowageError: a file is missing or damaged.
    """
    with tempfile.TemporaryDirectory() as temporary:
        unpack(out / PLANNED, Path(temporary))
        job = read_record(Path(temporary) / "job.json", GpuJob)
        folders = sorted((Path(temporary) / "plans").iterdir(), reverse=True)
        layers = layers_of(job)
        plans = {f.name: f for f in folders}
        everyone = contestants(job, plans, steps, out, Path(temporary) / "lower_tier", layers)
        chosen = like(everyone, only) if only else [*everyone]
        repeated = like(everyone, [part for part in again or () if part != FELL])
        if FELL in (again or ()):
            repeated += [name for name, found in _known(out).by_name.items() if found["note"].startswith(FALLEN)]
        if not chosen:
            raise ParameterError(f"There is no contestant like {', '.join(only)}: there are {', '.join(everyone)}.")
        if job.device == "cuda" and not _allocates(allocator):
            say(f"The allocator does not work here with '{allocator}': left as it is.")
            allocator = ""
        for name in chosen:
            known, digest = _known(out), _digest(everyone[name])
            if again is not None and name not in repeated and known.asked.get(name) == digest:
                say(f"{name}: {_said(_result(known.by_name[name]))}, as found before")
                continue
            left_s = math.inf if until is None else until - time.monotonic()
            result = None
            if left_s > 0:
                say(f"{name} …")
                limit_s = min(timeout_s, left_s)
                result = _run(everyone[name], Path(temporary), limit_s, allocator, say)
            if result is None or (left_s < timeout_s and result.note.startswith(STOPPED)):
                say(f"The time is used up before the end of {name}: the same call again goes on there.")
                break
            write_record(out / RESULTS, Results(known.by_name | {name: vars(result)}, known.asked | {name: digest}))
            say(f"{name}: {_said(result)}")
    rows = _table(out, job, everyone, layers)
    write_rows(out / TABLE, GpuRow, rows)
    return rows


def like(names: Collection[str], parts: Collection[str]) -> list[str]:
    """Return the names that contain one of `parts`, in any case; a part that is a whole name stands for it alone."""
    whole = {name.lower() for name in names}
    wanted = [part.lower() for part in parts]
    return [n for n in names if any(n.lower() == p or (p not in whole and p in n.lower()) for p in wanted)]


def _said(result: ContestantResult) -> str:
    if result.note:
        return result.note
    peak = f", peak {result.peak_bytes / 1e9:.2f} GB" if result.peak_bytes >= 0 else ""
    retries = f", {result.retries} retries" if result.retries > 0 else ""
    pinning = (
        f", {result.pin_s:.0f} s of it for pinning {result.pinned_bytes / 1e9:.1f} GB" if result.pinned_bytes else ""
    )
    clocks = f"; {' → '.join(result.clocks)}" if result.clocks else ""
    return f"{result.time_s:.3f} s a step{peak}{retries}, ready after {result.prepare_s:.0f} s{pinning}{clocks}"


@dataclass(frozen=True)
class Results:
    """The results of all contestants so far.

    Attributes:
        by_name: name -> `ContestantResult` as a dictionary.
        asked: name -> digest of what was asked.
    """

    by_name: dict[str, dict[str, Any]]
    asked: dict[str, str] = field(default_factory=dict)


def _known(out: Path) -> Results:
    return read_record(out / RESULTS, Results) if (out / RESULTS).exists() else Results({})


def _digest(request: Request) -> str:
    """Return the digest of everything that a result depends on, except paths."""
    content = asdict(request) | {"plan": "", "offload_dir": "", "trace_file": ""}
    found = hashlib.sha256(json.dumps(content, sort_keys=True).encode())
    if request.plan:
        found.update((Path(request.plan) / "step.py").read_bytes())
    return found.hexdigest()[:16]


def _allocates(allocator: str) -> bool:
    """Return whether the device gives memory under this setting; drivers differ."""
    code = "import torch; torch.ones(1, device='cuda')"
    environment = {**os.environ, **_environment(allocator)}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True).returncode == 0


def _environment(allocator: str, strict: bool = False) -> dict[str, str]:
    found = dict.fromkeys(ALLOCATOR_VARIABLES, allocator) if allocator else {}
    return found | ({CUBLAS_SETTING: CUBLAS_REPEATS} if strict else {})


def _run(request: Request, scratch: Path, timeout_s: float, allocator: str, say: Say) -> ContestantResult:
    asked, answer = scratch / "request.json", scratch / "answer.json"
    answer.unlink(missing_ok=True)
    asked.write_text(request_text(request))
    environment = _environment(allocator, bool(request.job.get("strict")))
    log = scratch / "log"
    ended = run_process([*CONTESTANT, str(asked), str(answer)], log, limit_s=timeout_s, environment=environment)
    if ended.code == 0 and answer.is_file():
        return _result(vars(read_record(answer, ContestantResult)))
    for line in ended.lines[-LOG_LINES:]:
        say(f"    {line}")
    return ContestantResult(note=ended.why() if ended.code is None else f"died: {ended.why()}")


def _result(content: Mapping[str, Any]) -> ContestantResult:
    return record_of(ContestantResult, {name: [*v] if isinstance(v, tuple) else v for name, v in content.items()})


def _table(out: Path, job: GpuJob, everyone: Mapping[str, Request], layers: int) -> list[GpuRow]:
    known = _known(out).by_name
    results = {name: _result(known[name]) for name in everyone if name in known}
    notes = {name: "keeps all weights on the device" for name in results if everyone[name].kind in KEEP_WEIGHTS}
    few, more = few_layers(layers)
    one, other = results.get(_fewer(few)), results.get(_fewer(more))
    if one is not None and other is not None:
        whole = extrapolate(few, one, more, other, layers)
        if whole is not None:
            results[EXTRAPOLATED] = whole
            notes[EXTRAPOLATED] = f"from {few} and {more} layers"
    return rows_of(results, {name: request.limit(job) for name, request in everyone.items()}, notes)
