"""Measures what collectives take: among the ranks of a process group, or among processes that are started for it.

A step gathers weights from all ranks by `start_gather`, so that is what is timed.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes

from stowage.stages.ir.errors import ParameterError, StowageError

PROBE_BYTES = 4 << 20
PROBES = 5
PATIENCE_S = 120.0
"""Seconds until processes that are measured must have found each other."""


@dataclass(frozen=True)
class CollectiveRates:
    """What collectives take among the ranks of a group.

    Attributes:
        bytes_per_s: bytes that a rank receives per second in a gather.
        start_s: time of a gather of next to no bytes.
    """

    bytes_per_s: float
    start_s: float


def start_gather(whole: torch.Tensor, shard: torch.Tensor, group: Any) -> Sequence[Any]:
    """Start filling a flat tensor with the flat shards of all ranks, in their order; return what to wait for."""
    if whole.device.type != "cpu":
        start = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return [start(whole, shard, group=group, async_op=True)]
    # Gloo's own gather copies what it receives once more; broadcasts write to where it belongs.
    parts = whole.chunk(dist.get_world_size(group))
    parts[dist.get_rank(group)].copy_(shard)
    return [dist.broadcast(part, _global(r, group), group, async_op=True) for r, part in enumerate(parts)]


def _global(rank: int, group: Any) -> int:
    return dist.get_global_rank(group, rank) if group is not None else rank


def measure_collectives(group: Any, device: torch.device) -> CollectiveRates:
    """Return what gathers take among the ranks of a group, which all call this; each measures numbers of its own."""
    small = _time_s(group, device, 64)
    large = _time_s(group, device, PROBE_BYTES)
    moved = PROBE_BYTES * (dist.get_world_size(group) - 1)
    # On a busy machine the small one may take as long as the large one, of which it is half at most.
    return CollectiveRates(moved / max(large - small, large / 2), min(small, large / 2))


def _time_s(group: Any, device: torch.device, nbytes: int) -> float:
    shard = torch.zeros(nbytes // 4, device=device)
    whole = torch.empty(dist.get_world_size(group) * shard.numel(), device=device)
    times = []
    for i in range(PROBES + 1):
        dist.barrier(group)
        began = time.perf_counter()
        for work in start_gather(whole, shard, group):
            work.wait()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if i:  # the first one connects the ranks
            times.append(time.perf_counter() - began)
    return statistics.median(times)


def measure_ranks(kind: str, ranks: int) -> CollectiveRates:
    """Start so many processes on this machine's devices, and return what gathers take among them.

    Raises:
        ParameterError: this machine has fewer GPUs.
        StowageError: the processes did not find each other.
    """
    if kind == "cuda" and torch.cuda.device_count() < ranks:
        raise ParameterError(
            f"{ranks} ranks need a GPU each, and this machine has {torch.cuda.device_count()}: measure where they are."
        )
    with tempfile.TemporaryDirectory() as folder:
        arguments = (kind, ranks, folder, torch.get_num_threads())
        try:
            start_processes(_measure_as_one, arguments, ranks, start_method="spawn")  # type: ignore[no-untyped-call]
            numbers = [float(word) for word in (Path(folder) / "rates").read_text().split()]
        except (ProcessRaisedException, ProcessExitedException, OSError) as error:
            reason = " ".join(str(error).split())[-200:]
            raise StowageError(f"{ranks} processes could not exchange data on this machine: {reason}") from None
    return CollectiveRates(*numbers)


def _measure_as_one(rank: int, kind: str, ranks: int, folder: str, threads: int) -> None:
    """Be one of the ranks; rank 0 writes what it has measured."""
    torch.set_num_threads(threads)
    device = torch.device(kind, rank) if kind == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=PATIENCE_S),
    )
    found = measure_collectives(None, device)
    if rank == 0:
        (Path(folder) / "rates").write_text(f"{found.bytes_per_s!r} {found.start_s!r}")
    dist.barrier()
    dist.destroy_process_group()
