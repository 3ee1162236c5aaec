"""Third step, on the machine with the GPU: every contestant in turn, each in its own process."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stowage.flows._gpu_carried import PLANNED, unpack
from stowage.flows._gpu_contestant import Request, Result, request_text
from stowage.flows._gpu_job import Job, build_shell
from stowage.flows._gpu_measure import Say
from stowage.flows._gpu_table import EXTRAPOLATED, REFERENCE, GpuRow, extrapolate, rows_of
from stowage.stages.ir.errors import ParameterError
from stowage.stages.ir.table import read_record, write_record, write_rows

RESULTS, TABLE, CHROME_TRACE = "results.json", "table.parquet", "trace.json"
CONTESTANT = (sys.executable, "-m", "stowage.flows._gpu_contestant")
"""What a contestant's process runs."""

FEW = (2, 4)
"""Layers of the two models that plain PyTorch is extrapolated from."""

ALLOCATOR = "expandable_segments:True"
"""The device's allocator then loses next to nothing between tensors, and a plan may use almost the whole limit."""

PEERS = {
    "gradient checkpointing, optimizer in host memory": "host optimizer",
    "FSDP2, CPUOffloadPolicy": "fsdp2",
    "DeepSpeed ZeRO-Offload": "zero-offload",
    "DeepSpeed ZeRO-3, offload": "zero-3",
}


def contestants(job: Job, plans: Mapping[str, Path], steps: int, out: Path, scratch: Path) -> dict[str, Request]:
    """Everyone, by name."""
    common = asdict(job)

    def request(
        kind: str, *, limited: bool = True, layers: int | None = None, plan: str = "", trace_file: str = ""
    ) -> Request:
        return Request(kind, common, steps, limited, layers, plan, str(scratch), trace_file)

    found: dict[str, Request] = {}
    for number, (fraction, folder) in enumerate(plans.items()):
        trace_file = "" if number else str(out / CHROME_TRACE)
        found[f"Stowage at {float(fraction):.0%}"] = request("stowage", plan=str(folder), trace_file=trace_file)
    found[REFERENCE] = request("plain", limited=False)
    for layers in FEW:
        found[f"plain PyTorch, {layers} layers"] = request("plain", limited=False, layers=layers)
    return found | {name: request(kind) for name, kind in PEERS.items()}


def race(
    out: Path, say: Say, *, steps: int, only: Sequence[str] = (), timeout_s: float = 540.0, allocator: str = ALLOCATOR
) -> list[GpuRow]:
    """Read `planned.tar.gz` in `out`; write results, `table.parquet` and `trace.json` there, and return the table.

    Results of earlier calls stay, so that a long race can be run in parts.

    Args:
        out: folder of all files.
        say: receives what people should know.
        steps: iterations to time.
        only: contestants whose names contain one of these, in any case; by default all.
        timeout_s: of one contestant.
        allocator: `PYTORCH_ALLOC_CONF` of the contestants.

    Raises:
        StowageError: a file is missing or damaged.
    """
    with tempfile.TemporaryDirectory() as temporary:
        unpack(out / PLANNED, Path(temporary))
        job = read_record(Path(temporary) / "job.json", Job)
        folders = sorted((Path(temporary) / "plans").iterdir(), reverse=True)
        everyone = contestants(job, {f.name: f for f in folders}, steps, out, Path(temporary) / "below")
        chosen = [n for n in everyone if not only or any(part.lower() in n.lower() for part in only)]
        if not chosen:
            raise ParameterError(f"There is no contestant like {', '.join(only)}: there are {', '.join(everyone)}.")
        if job.device == "cuda" and not _allocates(allocator):
            say(f"The allocator does not work here with '{allocator}': left as it is.")
            allocator = ""
        for name in chosen:
            say(f"{name} …")
            result = _run(everyone[name], Path(temporary), timeout_s, allocator)
            write_record(out / RESULTS, Results(_known(out) | {name: vars(result)}))
            peak = f", peak {result.peak_bytes / 1e9:.2f} GB" if result.peak_bytes >= 0 else ""
            say(f"{name}: {result.note or f'{result.time_s:.3f} s a step{peak}, ready after {result.prepare_s:.0f} s'}")
    rows = _table(out, job, list(everyone))
    write_rows(out / TABLE, GpuRow, rows)
    return rows


@dataclass(frozen=True)
class Results:
    """Of all contestants so far: name -> `Result` as a dictionary."""

    by_name: dict[str, dict[str, Any]]


def _known(out: Path) -> dict[str, dict[str, Any]]:
    return read_record(out / RESULTS, Results).by_name if (out / RESULTS).exists() else {}


def _allocates(allocator: str) -> bool:
    """Whether the device gives memory under this setting; drivers differ."""
    code = "import torch; torch.ones(1, device='cuda')"
    return (
        subprocess.run([sys.executable, "-c", code], env=_environment(allocator), capture_output=True).returncode == 0
    )


def _environment(allocator: str) -> dict[str, str]:
    return os.environ | ({"PYTORCH_ALLOC_CONF": allocator} if allocator else {})


def _run(request: Request, scratch: Path, timeout_s: float, allocator: str) -> Result:
    asked, answer = scratch / "request.json", scratch / "answer.json"
    answer.unlink(missing_ok=True)
    asked.write_text(request_text(request))
    log = scratch / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*CONTESTANT, str(asked), str(answer)],
            stdout=file,
            stderr=subprocess.STDOUT,
            env=_environment(allocator),
        )
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return Result(note=f"stopped after {timeout_s:.0f} s")
    if code == 0:
        return _result(vars(read_record(answer, Result)))
    last = (log.read_text(errors="replace").strip().splitlines() or ["no output"])[-1]
    return Result(note=f"died with exit status {code}, 9 being the kernel's answer to too little memory: {last[:160]}")


def _result(content: Mapping[str, Any]) -> Result:
    return Result(**{**content, "losses": tuple(content["losses"]), "times_s": tuple(content["times_s"])})


def _table(out: Path, job: Job, names: Sequence[str]) -> list[GpuRow]:
    known = _known(out)
    results = {name: _result(known[name]) for name in names if name in known}
    few, more = (results.get(f"plain PyTorch, {layers} layers") for layers in FEW)
    if few is not None and more is not None:
        model, _ = build_shell(job)
        layers = int(getattr(model, "config").num_hidden_layers)  # noqa: B009 - a module's attribute, for mypy
        whole = extrapolate(FEW[0], few, FEW[1], more, layers)
        if whole is not None:
            results[EXTRAPOLATED] = whole
    return rows_of(results, job.limit_bytes, {EXTRAPOLATED: f"from {FEW[0]} and {FEW[1]} layers"})
