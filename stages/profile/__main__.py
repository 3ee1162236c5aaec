"""Writes the costs of every distinct call to artifacts/profile: `python -m stowage.stages.profile`."""

from __future__ import annotations

import json
import sys

from rich.progress import Progress

from stowage.stages.device.heap import keep_freed_memory
from stowage.stages.ir.command import ARTIFACTS, DEVICE, STORE, run_stage
from stowage.stages.ir.costs import Cost, DeviceDescription
from stowage.stages.ir.files import write_atomically
from stowage.stages.ir.table import read_record, write_rows
from stowage.stages.ir.trace import TraceTables
from stowage.stages.profile import CostStore, profile_variants
from stowage.stages.rewrite import variants_of
from stowage.stages.rewrite.lossy import Classes, allowed
from stowage.stages.settings import load_settings


def main() -> None:
    """Measure what the store does not know, and export what this trace needs."""
    everything = load_settings()
    settings, lossy = everything.profile, everything.lossy.leave
    trace = TraceTables.load(ARTIFACTS / "trace")
    target = read_record(DEVICE, DeviceDescription)
    keep_freed_memory()  # in the mode that training has
    with Progress() as bar:
        task = bar.add_task("profile", total=None)
        costs = profile_variants(
            [
                *variants_of(trace).values(),
                *(Classes(trace).everywhere(allowed(lossy.kinds, freezes=True)) if lossy else ()),
            ],
            target,
            CostStore(STORE / "costs"),
            costs=settings.costs,
            seconds_per_call=settings.seconds_per_call,
            min_samples=settings.min_samples,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
            notice=lambda text: print(text, file=sys.stderr),
        )
    write_rows(ARTIFACTS / "profile" / "costs.parquet", Cost, costs)
    by_signature = {c.signature: c.time_s for c in costs}
    metrics = {
        "distinct_calls": len(costs),
        "estimated_calls": sum(c.source == "roofline" for c in costs),
        "step_time_s": sum(by_signature[c.signature] for c in trace.calls),
    }
    write_atomically(ARTIFACTS / "profile" / "metrics.json", (json.dumps(metrics, indent=2) + "\n").encode())
    print(f"profile: {len(costs)} distinct calls, {metrics['step_time_s']:.3f} s when each call of a step runs once")


if __name__ == "__main__":
    run_stage(main)
