"""Trains under a carried plan: everything comes from tables, nothing is planned here."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from stowage.flows.benchmarks.gpu.job import GpuJob, build_shell, fill, first_weights
from stowage.flows.benchmarks.gpu.pinned import CountedLanes, Pinned
from stowage.stages.device.tiers import PinnedTier, Tier, open_tier
from stowage.stages.ir.files import write_atomically
from stowage.stages.ir.graph import ComputeNode
from stowage.stages.ir.plan import Manifest, PlanRow, PlanSummary, Slot
from stowage.stages.ir.spans import chrome_trace, predicted_spans
from stowage.stages.ir.table import read_record, read_rows
from stowage.stages.ir.trace import TraceTables
from stowage.stages.runtime.executors.base import ExecutablePlan
from stowage.stages.runtime.executors.single import SingleDevice
from stowage.stages.runtime.observe.measure import measure_program
from stowage.stages.runtime.observe.tracing import trace_iteration


class PlannedContestant:
    """A model trained under the plan in `folder`.

    Attributes:
        summary: the plan's summary.
        pinned: counts what pinning host memory takes.
    """

    def __init__(self, job: GpuJob, folder: Path, offload_dir: Path) -> None:
        self.pinned = Pinned()
        self.summary = read_record(folder / "summary.json", PlanSummary)
        self._nodes = read_rows(folder / "nodes.parquet", ComputeNode)
        self._rows = read_rows(folder / "plan.parquet", PlanRow)
        self._slots = read_rows(folder / "slots.parquet", Slot)
        self.model, layouts = build_shell(job)
        self.optimizer = job.make_optimizer(self.model.parameters())
        path, manifest = folder / "step.py", read_record(folder / "manifest.json", Manifest)
        plan = ExecutablePlan(path.read_text(), manifest, path, TraceTables.load(folder / "trace"), self._slots)
        executor = SingleDevice(self.model, self.optimizer, partial(self._tier, job, offload_dir))
        self._offloading = executor.open(plan)
        if self._offloading is not None:
            self._offloading.populate(first_weights(job, layouts), self._slots)
        else:
            fill(job, self.model, layouts, job.device)
        self._program = executor.bind(plan)

    def _tier(self, job: GpuJob, offload_dir: Path) -> Tier:
        """Open pinned host memory as the lower tier of a GPU: these plans put nothing on a disk there."""
        if job.device != "cuda":
            return open_tier(job.device, offload_dir)
        size = sum(s.nbytes for s in self._slots) / 1e9
        print(f"{size:.1f} GB of host memory are pinned; tens of GB take tens of seconds.", flush=True)
        device = torch.device("cuda", torch.cuda.current_device())
        return PinnedTier(device, lanes=CountedLanes(device, self.pinned))

    def __call__(self, batch: Any) -> torch.Tensor:
        """Run one iteration."""
        return self._program(batch)

    def measured_peak(self, batch: Any) -> int:
        """Run one more iteration, and return its highest device bytes, from the allocator's events."""
        return measure_program(self._program, self.model, self.optimizer, batch).peak_bytes

    def write_trace(self, batch: Any, path: Path) -> None:
        """Run one more iteration, and write where its time goes beside the prediction."""
        _, measured = trace_iteration(self._program, lambda: self._program(batch))
        spans = [*predicted_spans(self._rows, self._nodes, self._slots), *measured]
        labels = {"plan": self.summary.plan_hash, "method": self.summary.method, "device": self.summary.device}
        write_atomically(path, chrome_trace(spans, labels).encode())

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and weight of each parameter, one at a time on the device; where they live does not change."""
        lower_tier = self._offloading.offloaded_parameters() if self._offloading is not None else {}
        for name, parameter in self.model.named_parameters():
            if self._offloading is not None and name in lower_tier:
                yield name, self._offloading.peek(name)
            else:
                yield name, parameter

    def close(self) -> None:
        """Wait for pending transfers, and close the tier."""
        if self._offloading is not None:
            self._offloading.settle_all()
            self._offloading.tier.close()
