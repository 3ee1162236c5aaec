"""Finds where a step's time goes: calls alone against whole steps, and the host's part against the card's."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from stowage.flows.benchmarks.gpu.by_rules import ByRules, TracedJob
from stowage.flows.benchmarks.gpu.first.exact import tidy
from stowage.flows.benchmarks.gpu.job import GpuJob
from stowage.flows.benchmarks.gpu.lanes import cycles_per_s, sleep
from stowage.flows.benchmarks.gpu.measure import trace_job
from stowage.flows.benchmarks.gpu.peers import Plain
from stowage.flows.benchmarks.gpu.steps import NOT_ASKED, StepAnswer
from stowage.flows.planning.true_kernels import with_true_kernels
from stowage.stages.device import device_of
from stowage.stages.ir.costs import Cost, DeviceDescription
from stowage.stages.ir.trace import TraceTables
from stowage.stages.profile import CostStore, profile_trace


def profile(asked: dict[str, Any]) -> StepAnswer:
    """Time every distinct call of a job."""
    job = GpuJob(**asked["job"])
    trace, costs = profiled(job, asked["seconds_per_call"], asked["min_samples"])
    guessed = sorted({c.target for c in trace.calls if costs[c.signature].source != "measured"})
    total = sum_of(trace, costs)
    numbers = {
        "job": job.name(),
        "calls": len(trace.calls),
        "distinct": len(costs),
        "estimated": guessed,
        "sum of a step, seconds": total,
        "most workspace, bytes": max(c.workspace_bytes for c in costs.values()),
    }
    text = f"{len(costs)} distinct of {len(trace.calls)} calls, {total * 1e3:.1f} ms a step, each call once"
    if guessed:
        return StepAnswer("fell", f"these calls could not be measured: {', '.join(guessed)}", numbers, (text,))
    return StepAnswer("held", numbers=numbers, lines=(text,))


def profiled(job: GpuJob, seconds_per_call: float, min_samples: int) -> tuple[TraceTables, dict[str, Cost]]:
    """Return the trace of a job, and a cost for each of its calls, by signature; keep nothing of it."""
    device = device_of(job.device)
    target = DeviceDescription(device.fingerprint(), job.device, _kind(job), 1, *(1.0,) * 7)

    def measured() -> tuple[TraceTables, list[Cost]]:
        with tempfile.TemporaryDirectory() as folder:
            trace = trace_job(job)
            store = CostStore(Path(folder))
            return trace, profile_trace(
                trace, target, store, seconds_per_call=seconds_per_call, min_samples=min_samples
            )

    trace, costs = with_true_kernels(measured)
    return trace, {c.signature: c for c in costs}


def _kind(job: GpuJob) -> Any:
    return job.device


def sum_of(trace: TraceTables, costs: dict[str, Cost]) -> float:
    """Return the seconds of a step in which each call runs once, as measured alone."""
    return sum(costs[c.signature].time_s for c in trace.calls if not c.is_view)


def idle(asked: dict[str, Any]) -> StepAnswer:
    """Compare the sum of all calls' times with eager steps.

    The difference is time in which the card waits for the host, less what calls take longer alone.
    """
    job = GpuJob(**asked["job"])
    trace, costs = profiled(job, asked["seconds_per_call"], asked["min_samples"])
    total = sum_of(trace, costs)
    tidy(job)
    found = timed(Plain(job), job, asked["steps"])
    share = 1 - total / found["step, seconds"]
    numbers = {"job": job.name(), "sum of calls, seconds": total, "idle share": share, **found}
    text = f"calls {total * 1e3:.2f} ms, eager step {found['step, seconds'] * 1e3:.2f} ms: idle share {share:.1%}"
    return StepAnswer("held", numbers=numbers, lines=(text,))


def small(asked: dict[str, Any]) -> StepAnswer:
    """Compare a small model under keep-all with eager: where the host is the limit, a planned step starves the card."""
    job = GpuJob(**asked["job"])
    numbers: dict[str, Any] = {"job": job.name()}
    traced = TracedJob(job)
    makers: dict[str, Callable[[], Any]] = {
        "eager, fused": lambda: Plain(job),
        "keep all": lambda: ByRules(traced, traced.keep_all()),
    }
    for name, make in makers.items():
        tidy(job)
        numbers[name] = timed(make(), job, asked["steps"])
    eager, planned = (numbers[name] for name in makers)
    ratio = planned["step, seconds"] / eager["step, seconds"]
    numbers["ratio"] = ratio
    lines = [f"keep all takes {ratio:.2f} × eager's time"]
    lines += [f"{name}: {_timed_text(numbers[name])}" for name in makers]
    return StepAnswer("held", numbers=numbers, lines=tuple(lines))


def timed(contestant: Any, job: GpuJob, steps: int, warm_up: int = 3) -> dict[str, Any]:
    """Time single steps, each begun with an idle card, and return medians.

    Returns:
        `step, seconds`: until everything is done; `host, seconds`: until the call returns, with work still queued;
        `card, seconds`: of the card's work when all of it is queued before any begins (as far as its queue reaches);
        `spread`: of whole steps, (most - least) / median.
    """
    cuda = job.device == "cuda"
    torch.manual_seed(job.seed)
    batch = job.batch(0)
    whole, host = [], []
    for number in range(warm_up + steps):
        if cuda:
            torch.cuda.synchronize()
        began = time.perf_counter()
        contestant(batch)
        returned = time.perf_counter()
        if cuda:
            torch.cuda.synchronize()
        if number >= warm_up:
            whole.append(time.perf_counter() - began)
            host.append(returned - began)
    median = statistics.median(whole)
    return {
        "step, seconds": median,
        "host, seconds": statistics.median(host),
        "card, seconds": _queued_s(lambda: contestant(batch), statistics.median(host)) if cuda else NOT_ASKED,
        "spread": (max(whole) - min(whole)) / median,
    }


def _queued_s(work: Callable[[], object], host_s: float, times: int = 5) -> float:
    """Return the median time of `work` on the card, queued behind a kernel that sleeps longer than queuing takes."""
    device = torch.device("cuda", torch.cuda.current_device())
    cycles = int(1.5 * host_s * cycles_per_s(device))
    event: Any = torch.cuda.Event
    found = []
    for _ in range(times):
        start, end = event(enable_timing=True), event(enable_timing=True)
        sleep(cycles)
        start.record()
        work()
        end.record()
        end.synchronize()
        found.append(1e-3 * float(start.elapsed_time(end)))
    return statistics.median(found)


def _timed_text(found: dict[str, Any]) -> str:
    card = found["card, seconds"]
    there = f"{card * 1e3:.2f} ms" if isinstance(card, float) else str(card)
    return f"host {found['host, seconds'] * 1e3:.2f} ms, card {there}, spread {found['spread']:.0%}"
