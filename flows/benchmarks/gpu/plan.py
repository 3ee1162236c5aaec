"""Plans on a machine that plans, the second step: from the carried trace and costs, within fractions of the limit."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from stowage.flows.benchmarks.gpu.carried import MEASURED, PLANNED, SOURCE, CarriedSource, digest_of, pack, unpack
from stowage.flows.benchmarks.gpu.job import GpuJob
from stowage.flows.benchmarks.gpu.measure import Library, Say
from stowage.flows.planning.step import Effort, Planned, Planning, cost_traces, plan_costed
from stowage.stages.ir.costs import Cost, DeviceDescription
from stowage.stages.ir.errors import Infeasible, size_text
from stowage.stages.ir.table import read_record, read_rows, write_record
from stowage.stages.ir.trace import TraceTables
from stowage.stages.rewrite import variants_of
from stowage.stages.solve import LowerTier, lower_tier_of


def plan_job(out: Path, say: Say, *, fractions: Sequence[float], method: str, stores: Path, effort: Effort) -> None:
    """Read `measured.tar.gz` in `out`, write `planned.tar.gz` there.

    Args:
        out: folder of both.
        say: receives what people should know.
        fractions: fractions of the limit, one plan each; what the device's allocator loses between tensors is in no
            plan.
        method: see `fit`.
        stores: folder of the stores.
        effort: how much time planning may take.

    Raises:
        StowageError: a file is missing or damaged; `Infeasible` if no fraction has a plan.
    """
    with tempfile.TemporaryDirectory() as temporary:
        measured, planned = Path(temporary) / "measured", Path(temporary) / "planned"
        unpack(out / MEASURED, measured)
        job = read_record(measured / "job.json", GpuJob)
        target = read_record(measured / "device.json", DeviceDescription)
        kept = read_record(measured / "library.json", Library).device_bytes
        trace = TraceTables.load(measured / "trace")
        costs = read_rows(measured / "costs.parquet", Cost)
        target = replace(target, library_bytes=max(target.library_bytes, kept))
        costed = cost_traces(variants_of(trace), costs, trace, target)
        failed: list[Infeasible] = []
        for fraction in sorted(fractions, reverse=True):
            began = time.perf_counter()
            try:
                lower_tier = lower_tier_of_job(job, target, Path(temporary))
                how = Planning(stores=stores, effort=effort, method=method, lower_tier=lower_tier)
                found = plan_costed(costed, int(fraction * job.limit_bytes), how)
            except Infeasible as infeasible:
                failed.append(infeasible)
                say(f"{fraction:.0%} of the limit: {infeasible}")
                continue
            shutil.copytree(found.folder, planned / "plans" / f"{fraction:.3f}")
            say(f"{fraction:.0%} of the limit: {describe_plan(found)}, planned in {time.perf_counter() - began:.0f} s")
        if not planned.is_dir():
            raise failed[-1]
        shutil.copy(measured / "job.json", planned / "job.json")
        write_record(planned / SOURCE, CarriedSource(digest_of(out / MEASURED)))
        nbytes = pack(out / PLANNED, planned)
    say(f"{out / PLANNED}: {nbytes / 1e6:.1f} MB")


def lower_tier_of_job(job: GpuJob, target: DeviceDescription, folder: Path) -> LowerTier | None:
    """Return the lower tier of a job: pinned host memory, or the disk of a machine without a GPU."""
    if job.device == "cuda":
        return lower_tier_of(target, host_budget=job.host_bytes, disk_budget=None, offload_dir=None)
    return lower_tier_of(target, host_budget=None, disk_budget=job.host_bytes, offload_dir=folder, here=False)


def describe_plan(found: Planned) -> str:
    """Describe a plan in one line."""
    s = found.summary
    return (
        f"{s.method}, predicted {s.step_time_s:.3f} s a step ({s.step_time_s / s.lower_bound_s:.2f} × each call once), "
        f"peak {size_text(s.device_peak_bytes)} of {size_text(s.device_budget_bytes)}, "
        f"{size_text(s.lower_tier_bytes)} offloaded, {size_text(s.offload_bytes)} down and "
        f"{size_text(s.reload_bytes)} up a step"
    )
