"""One contestant in a process of its own, held to the limit: `python -m stowage.flows._gpu_contestant REQUEST ANSWER`.

Both are files of JSON: a `Request` and a `Result`.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stowage.flows._gpu_job import Job, limit_memory
from stowage.flows._gpu_peers import DeepSpeed, FullySharded, HostOptimizer, Plain, UnavailableError
from stowage.flows._gpu_stowage import Planned
from stowage.stages.ir.command import Parser
from stowage.stages.ir.errors import StowageError, size_text
from stowage.stages.ir.table import write_record

WARM_UP = 2
"""Iterations before any is timed: states are made in the first."""


@dataclass(frozen=True)
class Request:
    """What a contestant is asked.

    Attributes:
        kind: `plain`, `host optimizer`, `fsdp2`, `zero-offload`, `zero-3` or `stowage`.
        job: of all contestants, as a dictionary.
        steps: iterations to time, after the warm-up.
        limited: hold the process to the job's limit.
        layers: of the model, None for its own.
        plan, offload_dir, trace_file: of `stowage`: folders, and where a Chrome trace goes.
    """

    kind: str
    job: dict[str, Any]
    steps: int
    limited: bool
    layers: int | None
    plan: str
    offload_dir: str
    trace_file: str


@dataclass(frozen=True)
class Result:
    """What it found.

    Attributes:
        note: why there is no result, empty if there is one.
        losses: of every iteration, warm-up included.
        times_s: of the timed iterations.
        peak_bytes: highest allocated on the device, -1 where that cannot be told.
        reserved_bytes: highest that the device's allocator held, -1 where it does not say.
        host_bytes: highest resident memory of the process, pinned memory included.
        prepare_s: from the start of the process to the first iteration.
        predicted_time_s, predicted_peak_bytes: of the plan; NaN and -1 without one.
    """

    note: str
    losses: tuple[float, ...] = ()
    times_s: tuple[float, ...] = ()
    peak_bytes: int = -1
    reserved_bytes: int = -1
    host_bytes: int = -1
    prepare_s: float = 0.0
    predicted_time_s: float = float("nan")
    predicted_peak_bytes: int = -1

    @property
    def time_s(self) -> float:
        """Median."""
        return statistics.median(self.times_s) if self.times_s else float("nan")


def make(request: Request, job: Job) -> Any:
    """The contestant, ready for its first iteration.

    Raises:
        StowageError: it cannot run here.
    """
    match request.kind:
        case "plain":
            return Plain(job, request.layers)
        case "host optimizer":
            return HostOptimizer(job)
        case "fsdp2":
            return FullySharded(job)
        case "zero-offload":
            return DeepSpeed(job, stage=2)
        case "zero-3":
            return DeepSpeed(job, stage=3)
        case "stowage":
            return Planned(job, Path(request.plan), Path(request.offload_dir))
        case _:
            raise StowageError(f"There is no contestant '{request.kind}'.")


def compete(request: Request) -> Result:
    """Run the iterations."""
    job = Job(**request.job)
    cuda = job.device == "cuda"
    began = time.perf_counter()
    try:
        if request.limited:
            limit_memory(job)
        torch.manual_seed(job.seed)
        contestant = make(request, job)
        prepared = time.perf_counter()
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        losses: list[float] = []
        times: list[float] = []
        for iteration in range(WARM_UP + request.steps):
            batch = job.batch(iteration)
            start = time.perf_counter()
            losses.append(float(contestant(batch)))
            times.append(time.perf_counter() - start)
        if cuda:
            torch.cuda.synchronize()
        peak, reserved = _peaks(contestant, job, WARM_UP + request.steps)
        if request.trace_file:
            contestant.write_trace(job.batch(WARM_UP + request.steps), Path(request.trace_file))
        summary = contestant.summary if isinstance(contestant, Planned) else None
        if isinstance(contestant, Planned):
            contestant.close()
    except torch.OutOfMemoryError as error:
        return Result(note=_out_of_memory(error, job, cuda))
    except UnavailableError as error:
        return Result(note=str(error))
    except StowageError as error:
        return Result(note=f"refused: {error}")
    except Exception as error:  # a peer's own failure is a result, too
        return Result(note=f"failed: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
    return Result(
        note="",
        losses=tuple(losses),
        times_s=tuple(times[WARM_UP:]),
        peak_bytes=peak,
        reserved_bytes=reserved,
        host_bytes=_highest_resident_bytes(),
        prepare_s=prepared - began,
        predicted_time_s=summary.step_time_s if summary else float("nan"),
        predicted_peak_bytes=summary.device_peak_bytes if summary else -1,
    )


def _peaks(contestant: Any, job: Job, iteration: int) -> tuple[int, int]:
    """Of the device's allocator over all iterations; on the CPU of one more iteration."""
    if job.device == "cuda":
        return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    if hasattr(contestant, "measured_peak"):
        return contestant.measured_peak(job.batch(iteration)), -1
    return -1, -1


def _highest_resident_bytes() -> int:
    """Of this process alone: `ru_maxrss` begins with what the parent had."""
    with open("/proc/self/status", encoding="ascii") as file:
        fields = dict(line.split(":", 1) for line in file)
    return int(fields["VmHWM"].split()[0]) * 1024


def _out_of_memory(error: Exception, job: Job, cuda: bool) -> str:
    text = f"does not fit {size_text(job.limit_bytes)}: {(str(error).splitlines() or [''])[0][:160]}"
    if cuda:
        allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        text += f" (allocated {size_text(allocated)}, reserved {size_text(reserved)})"
    return text


def main() -> int:
    """Answer one request."""
    parser = Parser(__doc__)
    parser.add_argument("request", type=Path, help="file with what to train, as JSON")
    parser.add_argument("result", type=Path, help="file to write")
    given = parser.parse_args()
    request = Request(**json.loads(given.request.read_text()))
    result = compete(request)
    write_record(given.result, result)
    if result.note:
        print(result.note, file=sys.stderr)
    return 0


def request_text(request: Request) -> str:
    """What `main` reads."""
    return json.dumps(dataclasses.asdict(request))


if __name__ == "__main__":
    sys.exit(main())
