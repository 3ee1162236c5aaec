"""Measures a combination of techniques on two ranks of this machine.

Each rank is a process of its own: `python -m stowage.flows.benchmarks.slimfit.pairs_on_ranks`, by `measured_on_ranks`.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from stowage.flows.benchmarks.slimfit.pair_job import PairJob, PairRow, PairSize, measured
from stowage.stages.ir.command import run_stage
from stowage.stages.ir.files import write_atomically
from stowage.stages.train.launch import launch, obey

REQUEST = "STOWAGE_PAIR_REQUEST"
"""Environment variable with the file of what is asked."""

RANKS = 2
PATIENCE = timedelta(minutes=10)


def measured_on_ranks(job: PairJob, updates: int) -> PairRow:
    """Return what the rank takes that takes most.

    Args:
        job: the combination.
        updates: timed updates.

    Raises:
        StowageError: a rank failed.
    """
    folder = job.folder.absolute()
    request_at, found_at = folder / "request.json", folder / "found.json"
    techniques, stores = sorted(job.techniques), str(job.stores.absolute())
    asked = {"techniques": techniques, "stores": stores, "folder": str(folder), "updates": updates}
    asked["size"] = asdict(job.size)
    write_atomically(request_at, json.dumps({**asked, "found": str(found_at)}).encode())
    threads = max(1, torch.get_num_threads() // RANKS)  # the ranks share the cores
    launch(__name__, RANKS, {REQUEST: str(request_at), "OMP_NUM_THREADS": str(threads)})
    found = json.loads(found_at.read_text())
    return PairRow(**{**found, "kept": tuple(found["kept"])})


def main() -> None:
    """Measure as one rank; rank 0 writes what was found."""
    obey()
    asked = json.loads(Path(os.environ[REQUEST]).read_text())
    dist.init_process_group("gloo", timeout=PATIENCE)
    try:
        folder = Path(asked["folder"]) / str(dist.get_rank())
        folder.mkdir()
        size = PairSize(**{**asked["size"], "quantised": tuple(asked["size"]["quantised"])})
        job = PairJob(frozenset(asked["techniques"]), Path(asked["stores"]), folder, size)
        row = _of_ranks(measured(job, asked["updates"]))
        if dist.get_rank() == 0:
            write_atomically(Path(asked["found"]), json.dumps(asdict(row)).encode())
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _of_ranks(own: PairRow) -> PairRow:
    """Return the row of the rank with the highest peak."""
    rows: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(rows, own)
    most: PairRow = max(rows, key=lambda row: row.peak_bytes)
    return replace(most, predicted_peak_bytes=max(row.predicted_peak_bytes for row in rows))


if __name__ == "__main__":
    run_stage(main)
