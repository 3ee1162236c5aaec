"""Measures what collectives take: among the ranks of a process group, or among processes that are started for it.

A step gathers weights from all ranks by `start_gather`, so that is what is timed.
"""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes

from stowage.stages.device.rates.at_once import Work, nothing
from stowage.stages.ir.errors import ParameterError, StowageError, TableError
from stowage.stages.ir.table import read_record, write_record

Found = TypeVar("Found")

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


def collectives_wait_for(group: Any, device: torch.device, copies: Work) -> bool:
    """Return whether gathers take so much longer beside copies of all ranks that both must pass over one link.

    All ranks of the group call it; `copies` starts more than lasts for a gather.
    """
    return shares_link(_time_s(group, device, PROBE_BYTES), _time_s(group, device, PROBE_BYTES, copies))


def shares_link(alone_s: float, beside_s: float) -> bool:
    """Return what is nearer to the times of a collective: that copies beside it double its time, or that none do."""
    return beside_s > math.sqrt(2.0) * alone_s


def measure_collectives(group: Any, device: torch.device) -> CollectiveRates:
    """Return what gathers take among the ranks of a group, which all call this; each measures numbers of its own."""
    small = _time_s(group, device, 64)
    large = _time_s(group, device, PROBE_BYTES)
    moved = PROBE_BYTES * (dist.get_world_size(group) - 1)
    # On a busy machine the small one may take as long as the large one, of which it is half at most.
    return CollectiveRates(moved / max(large - small, large / 2), min(small, large / 2))


def _time_s(group: Any, device: torch.device, nbytes: int, beside: Work = nothing) -> float:
    shard = torch.zeros(nbytes // 4, device=device)
    whole = torch.empty(dist.get_world_size(group) * shard.numel(), device=device)
    times = []
    for i in range(PROBES + 1):
        dist.barrier(group)
        beside()
        began = time.perf_counter()
        for work in start_gather(whole, shard, group):
            work.wait()
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # not what copies beside it
        if i:  # the first one connects the ranks
            times.append(time.perf_counter() - began)
    return statistics.median(times)


def measure_ranks(kind: str, ranks: int) -> CollectiveRates:
    """Start so many processes on this machine's devices, and return what gathers take among them.

    Raises:
        ParameterError: this machine has fewer GPUs.
        StowageError: the processes did not find each other.
    """
    return among_processes(kind, ranks, CollectiveRates, partial(measure_collectives, None))


def among_processes(kind: str, ranks: int, record: type[Found], measure: Callable[[torch.device], Found]) -> Found:
    """Start so many processes on this machine's devices, and return what the first measures among them.

    Args:
        kind: the kind of device.
        ranks: the number of processes.
        record: what is measured.
        measure: measures it in each process, whose default group has all of them.

    Raises:
        ParameterError: this machine has fewer GPUs.
        StowageError: the processes did not find each other.
    """
    if kind == "cuda" and torch.cuda.device_count() < ranks:
        raise ParameterError(
            f"{ranks} ranks need a GPU each, and this machine has {torch.cuda.device_count()}: measure where they are."
        )
    with tempfile.TemporaryDirectory() as folder:
        arguments = (kind, ranks, folder, torch.get_num_threads(), measure)
        try:
            start_processes(_measure_as_one, arguments, ranks, start_method="spawn")  # type: ignore[no-untyped-call]
            return read_record(Path(folder) / "found", record)
        except (ProcessRaisedException, ProcessExitedException, OSError, TableError) as error:
            reason = " ".join(str(error).split())[-200:]
            raise StowageError(f"{ranks} processes could not exchange data on this machine: {reason}") from None


def _measure_as_one(
    rank: int, kind: str, ranks: int, folder: str, threads: int, measure: Callable[[torch.device], object]
) -> None:
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
    found = measure(device)
    if rank == 0:
        write_record(Path(folder) / "found", found)
    dist.barrier()
    dist.destroy_process_group()
