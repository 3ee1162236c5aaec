"""Measures on the machine with the GPU, the first step: its rates, the trace, and the cost of every distinct call."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from stowage.flows.benchmarks.gpu.carried import MEASURED, pack
from stowage.flows.benchmarks.gpu.job import GpuJob, build_shell, strictly
from stowage.flows.planning.true_kernels import with_true_kernels
from stowage.stages.device import device_of
from stowage.stages.device.rates.host import measure_host_rates
from stowage.stages.ir.costs import Cost, DeviceDescription
from stowage.stages.ir.table import write_record, write_rows
from stowage.stages.ir.trace import TraceTables
from stowage.stages.profile import CostStore, profile_variants
from stowage.stages.rewrite import variants_of
from stowage.stages.trace import MicroBatch, record_step, with_updates

Say = Callable[[str], None]
FLOAT32_ROOM = 1.3
"""Multiple of weights, gradients and two states in float32 that the free host memory must have room for."""


@dataclass(frozen=True)
class Library:
    """Memory that libraries keep.

    Attributes:
        device_bytes: bytes of device memory once every call has run, such as matrix products' workspace.
    """

    device_bytes: int


def fitting_dtype(parameters: int, free_bytes: int) -> str:
    """Return `float32` if the training state fits the host memory in it, else `bfloat16`."""
    return "float32" if FLOAT32_ROOM * 16 * parameters <= free_bytes else "bfloat16"


def trace_job(job: GpuJob, max_grad_norm: float | None = None) -> TraceTables:
    """Record one step on tensors without memory.

    Raises:
        TraceError: the model cannot be traced.
    """
    model, layouts = build_shell(job)
    optimizer = job.make_optimizer(model.parameters())
    recorded = record_step(model, job.batch(0), layouts=layouts)
    clipped = MicroBatch(max_grad_norm=max_grad_norm)
    return with_updates(recorded, model, optimizer=optimizer, micro_batch=clipped, label=job.name())


def measure_job(job: GpuJob, out: Path, say: Say, *, seconds_per_call: float = 0.05, min_samples: int = 5) -> None:
    """Measure a job on this machine, and write `measured.tar.gz`.

    Args:
        job: what will be trained.
        out: folder for the result.
        say: receives what people should know.
        seconds_per_call: seconds to spend on each distinct call.
        min_samples: samples of each distinct call at least.
    """
    device = device_of(job.device)
    with tempfile.TemporaryDirectory() as temporary, strictly(job.strict):
        folder = Path(temporary) / "measured"
        description = device.describe(temporary)
        if job.device == "cuda":  # CPU updates run the job's own optimizer, in the job's type
            host = measure_host_rates(torch.device("cuda"), job.make_optimizer, getattr(torch, job.dtype))
            description = replace(description, cpu_update_bytes_per_s=host.update)
        say(describe_device(description))

        def measured() -> tuple[TraceTables, list[Cost]]:
            trace = trace_job(job)
            distinct = len({c.signature for c in trace.calls})
            say(f"trace: {len(trace.calls)} calls, {distinct} of them distinct, {trace.meta.parameters:,} parameters")
            return trace, profile_variants(
                variants_of(trace).values(),
                description,
                CostStore(Path(temporary) / "costs"),
                seconds_per_call=seconds_per_call,
                min_samples=min_samples,
                notice=say,
            )

        trace, costs = with_true_kernels(measured)
        time_of = {c.signature: c.time_s for c in costs}
        say(f"profile: {sum(time_of[c.signature] for c in trace.calls if not c.is_view):.3f} s a step, each call once")
        gc.collect()
        kept = torch.cuda.memory_allocated() if job.device == "cuda" else 0
        (folder / "trace").mkdir(parents=True)
        write_record(folder / "job.json", job)
        write_record(folder / "device.json", description)
        write_record(folder / "library.json", Library(kept))
        write_rows(folder / "costs.parquet", Cost, costs)
        trace.save(folder / "trace")
        nbytes = pack(out / MEASURED, folder)
    say(f"{out / MEASURED}: {nbytes / 1e6:.1f} MB")


def describe_device(found: DeviceDescription) -> str:
    """Describe a device in one line."""
    rates = {
        "device to host": found.offload_bytes_per_s,
        "host to device": found.reload_bytes_per_s,
        "both": found.duplex_bytes_per_s,
        "memory": found.memory_copy_bytes_per_s,
        "update": found.update_bytes_per_s,
        "update by the CPU": found.cpu_update_bytes_per_s,
    }
    listed = ", ".join(f"{name} {rate / 1e9:.1f} GB/s" for name, rate in rates.items() if rate)
    return f"{found.name}: {found.memory_bytes / 1e9:.1f} GB, {found.flops_per_s / 1e12:.2f} TFLOP/s, {listed}"
