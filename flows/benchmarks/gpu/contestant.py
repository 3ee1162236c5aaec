"""Runs one contestant in a process of its own, whose memory is limited.

`python -m stowage.flows.benchmarks.gpu.contestant REQUEST ANSWER`.

Both are files of JSON: a `Request` and a `ContestantResult`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import statistics
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stowage.flows.benchmarks.gpu.clocks import clocks_now
from stowage.flows.benchmarks.gpu.job import GpuJob, limit_memory, strictly
from stowage.flows.benchmarks.gpu.peers import DeepSpeed, FullySharded, HostOptimizer, Plain, UnavailableError
from stowage.flows.benchmarks.gpu.pinned import Pinned
from stowage.flows.benchmarks.gpu.planned import PlannedContestant
from stowage.flows.benchmarks.gpu.process import obey
from stowage.stages.device.peaks import NOT_COUNTED, Peaks
from stowage.stages.ir.command import Parser
from stowage.stages.ir.errors import StowageError, size_text
from stowage.stages.ir.table import write_record

WARM_UP = 2
"""Number of iterations before any is timed: states are made in the first."""


@dataclass(frozen=True)
class Request:
    """A request to a contestant.

    Attributes:
        kind: `plain`, `host optimizer`, `fsdp2`, `zero-offload`, `zero-3` or `stowage`.
        job: the job of all contestants, as a dictionary.
        steps: iterations to time, after the warm-up.
        limited: hold the process to a limit.
        layers: the number of layers, None for the model's own.
        plan: folder of the plan; of `stowage` alone.
        offload_dir: folder for offloaded tensors; of `stowage` alone.
        trace_file: path of the Chrome trace; of `stowage` alone.
        limit_bytes: the limit, -1 for the job's.
    """

    kind: str
    job: dict[str, Any]
    steps: int
    limited: bool
    layers: int | None
    plan: str
    offload_dir: str
    trace_file: str
    limit_bytes: int = -1

    def limit(self, job: GpuJob) -> int:
        """Return the limit in bytes, -1 for none."""
        if not self.limited:
            return -1
        return job.limit_bytes if self.limit_bytes < 0 else self.limit_bytes


@dataclass(frozen=True)
class ContestantResult:
    """A contestant's result.

    Attributes:
        note: why there is no result, empty if there is one.
        losses: losses of every iteration, warm-up included.
        times_s: times of the timed iterations.
        peak_bytes: highest allocated on the device, -1 where that is unknown.
        reserved_bytes: highest that the device's allocator reserved, -1 where it does not say.
        host_bytes: highest resident memory of the process, pinned memory included.
        prepare_s: from the start of the process to the first iteration.
        predicted_time_s: step time that the plan predicts; NaN without a plan.
        predicted_peak_bytes: peak that the plan predicts; -1 without a plan.
        requested_bytes: highest that tensors asked for, without what the allocator rounds up; -1 where it does not say.
        retries: allocations in all iterations that succeeded only after everything cached was given back; a step that
            has some is near its limit, and slow. -1 where the allocator does not say.
        timed_retries: the retries in timed iterations.
        out_of_memory: allocations that failed, -1 where the allocator does not say.
        pin_s: seconds that pinning host memory took, nearly all of it within `prepare_s`; NaN where it is not counted.
        pinned_bytes: bytes of host memory that were pinned, as asked for.
        clocks: the card's clocks before and after the timed iterations, for people.
        weights: digest of all weights at the end, of strict jobs.
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
    requested_bytes: int = -1
    retries: int = -1
    timed_retries: int = -1
    out_of_memory: int = -1
    pin_s: float = float("nan")
    pinned_bytes: int = 0
    clocks: tuple[str, ...] = ()
    weights: str = ""

    @property
    def time_s(self) -> float:
        """Return the median step time."""
        return statistics.median(self.times_s) if self.times_s else float("nan")

    @property
    def spread(self) -> float:
        """Return the spread of the times, (most - least) / median; NaN for fewer than two."""
        return (max(self.times_s) - min(self.times_s)) / self.time_s if len(self.times_s) > 1 else float("nan")


def make(request: Request, job: GpuJob) -> Any:
    """Make the contestant, ready for its first iteration.

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
            return PlannedContestant(job, Path(request.plan), Path(request.offload_dir))
        case _:
            raise StowageError(f"There is no contestant '{request.kind}'.")


def compete(request: Request) -> ContestantResult:
    """Run the iterations and return the result."""
    job = GpuJob(**request.job)
    with strictly(job.strict):
        try:
            return _competed(request, job)
        except torch.OutOfMemoryError as error:
            return ContestantResult(note=_out_of_memory(error, request.limit(job), job.device == "cuda"))
        except UnavailableError as error:
            return ContestantResult(note=str(error))
        except StowageError as error:
            return ContestantResult(note=f"refused: {error}")
        except Exception as error:  # a peer's own failure is a result, too
            traceback.print_exc()
            return ContestantResult(note=f"failed: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}")


def _competed(request: Request, job: GpuJob) -> ContestantResult:
    began = time.perf_counter()
    if request.limited:
        limit_memory(job, request.limit(job))
    torch.manual_seed(job.seed)
    contestant = make(request, job)
    prepared = time.perf_counter()
    peaks = Peaks(torch.device(job.device))
    losses: list[float] = []
    times: list[float] = []
    clocks: list[str] = []
    warm = peaks.now()
    for iteration in range(WARM_UP + request.steps):
        if iteration == WARM_UP:
            clocks.append(_clocks(job))
            warm = peaks.now()
        batch = job.batch(iteration)
        start = time.perf_counter()
        losses.append(float(contestant(batch)))
        times.append(time.perf_counter() - start)
    if job.device == "cuda":
        torch.cuda.synchronize()
    clocks.append(_clocks(job))
    found = peaks.now()
    counted = found or NOT_COUNTED
    peak = found.allocated_bytes if found is not None else _measured_peak(contestant, job, WARM_UP + request.steps)
    digest = weights_digest(contestant) if job.strict else ""
    if request.trace_file:
        contestant.write_trace(job.batch(WARM_UP + request.steps + 1), Path(request.trace_file))
    summary = contestant.summary if isinstance(contestant, PlannedContestant) else None
    pinned: Pinned | None = getattr(contestant, "pinned", None)
    if isinstance(contestant, PlannedContestant):
        contestant.close()
    return ContestantResult(
        note="",
        losses=tuple(losses),
        times_s=tuple(times[WARM_UP:]),
        peak_bytes=peak,
        reserved_bytes=counted.reserved_bytes,
        host_bytes=_highest_resident_bytes(),
        prepare_s=prepared - began,
        predicted_time_s=summary.step_time_s if summary else float("nan"),
        predicted_peak_bytes=summary.device_peak_bytes if summary else -1,
        requested_bytes=counted.requested_bytes,
        retries=counted.retries,
        timed_retries=counted.retries - warm.retries if warm is not None else -1,
        out_of_memory=counted.out_of_memory,
        pin_s=pinned.seconds if pinned is not None else float("nan"),
        pinned_bytes=pinned.nbytes if pinned is not None else 0,
        clocks=tuple(text for text in clocks if text),
        weights=digest,
    )


def _clocks(job: GpuJob) -> str:
    """Read the clocks while the card is at work or has just been: an idle one slows down at once."""
    return clocks_now() if job.device == "cuda" else ""


def _measured_peak(contestant: Any, job: GpuJob, iteration: int) -> int:
    """Measure the peak of one more iteration, where the device's allocator keeps no peaks."""
    return int(contestant.measured_peak(job.batch(iteration))) if hasattr(contestant, "measured_peak") else -1


def weights_digest(contestant: Any) -> str:
    """Return the digest of all weights, read one at a time; empty for contestants that do not show them."""
    if not hasattr(contestant, "weights"):
        return ""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in contestant.weights():
        content = tensor.detach().to("cpu").contiguous().flatten().view(torch.uint8)
        digest.update(name.encode())
        digest.update(content.numpy().data)
    return digest.hexdigest()


def _highest_resident_bytes() -> int:
    """Return the highest resident memory of this process alone: `ru_maxrss` begins with the parent's."""
    with open("/proc/self/status", encoding="ascii") as file:
        fields = dict(line.split(":", 1) for line in file)
    return int(fields["VmHWM"].split()[0]) * 1024


def _out_of_memory(error: Exception, limit_bytes: int, cuda: bool) -> str:
    where = size_text(limit_bytes) if limit_bytes >= 0 else "the device"
    text = f"does not fit {where}: {(str(error).splitlines() or [''])[0][:160]}"
    if cuda:
        allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        text += f" (allocated {size_text(allocated)}, reserved {size_text(reserved)})"
    return text


def main() -> int:
    """Answer one request."""
    obey()
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
    """Return a request as the text that `main` reads."""
    return json.dumps(dataclasses.asdict(request))


if __name__ == "__main__":
    sys.exit(main())
