"""Measures the machine as the ranks of a group see it: collectives, and what the host gives them all at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from stowage.stages.device.rates.shares import HostShares
from stowage.stages.ir.costs import DeviceDescription
from stowage.stages.ir.parallel import ParallelMachine
from stowage.stages.runtime.sharding.ranks import Ranks
from stowage.stages.runtime.sharding.shares import host_shares
from stowage.stages.solve import free_ram

SMALL, LARGE = 1 << 10, 4 << 20
"""Elements of the two gathers whose times give latency and rate."""

TIMES = 5
"""Number of gathers of each size."""

ADAMW_BYTES = 28
"""Bytes that an AdamW update in float32 reads and writes for each parameter."""


def parallel_machine(
    target: DeviceDescription,
    ranks: Ranks | None,
    device: torch.device,
    *,
    device_bytes: int,
    host_bytes: int,
    stores: Path,
) -> ParallelMachine:
    """Describe the machine of a group of ranks, which all call this together.

    Args:
        target: rates of one device.
        ranks: all of them; None for this process alone.
        device: where this rank computes.
        device_bytes: what a rank may use of its device.
        host_bytes: what all ranks may use of the host.
        stores: folder where the shares of the host are remembered.
    """
    count = 1 if ranks is None else ranks.count
    latency_s, rate = 0.0, target.memory_copy_bytes_per_s
    host = _alone(target)
    updates = target.update_bytes_per_s
    if ranks is not None and count > 1:
        host = host_shares(ranks, device, stores / "devices")
        if device.type == "cpu":
            updates = host.update  # the device's own are the same
        with ranks.failures.named("probes of the rates of collectives"):
            latency_s, rate = _rates(ranks.group, device)
    return ParallelMachine(
        name=f"{count} × {target.name}",
        ranks=count,
        device_bytes=device_bytes,
        host_bytes=host_bytes,
        collective_bytes_per_s=rate,
        collective_latency_s=latency_s,
        reload_bytes_per_s=count * host.reload,
        offload_bytes_per_s=count * host.offload,
        duplex_bytes_per_s=count * host.duplex,
        device_updates_per_s=count * updates / ADAMW_BYTES,
        host_updates_per_s=count * host.update / ADAMW_BYTES,
        collectives_share_link=host.collectives_share_link,
    )


def _alone(target: DeviceDescription) -> HostShares:
    """Return what a single rank has of the host: everything."""
    copies = target.memory_copy_bytes_per_s / 2  # on a CPU the host is the device's own memory
    return HostShares(
        target.offload_bytes_per_s or copies,
        target.reload_bytes_per_s or copies,
        target.duplex_bytes_per_s or copies,
        target.cpu_update_bytes_per_s or target.update_bytes_per_s,
    )


def _rates(group: dist.ProcessGroup, device: torch.device) -> tuple[float, float]:
    """Return the latency of a gather and the bytes that a rank receives per second, equal on all ranks."""
    ranks = group.size()
    share = torch.zeros(LARGE // ranks, device=device)
    whole = torch.empty(LARGE // ranks * ranks, device=device)

    def gather(elements: int) -> float:
        part = elements // ranks
        parts = list(torch.split(whole[: part * ranks], part))
        return _timed(lambda: dist.all_gather(parts, share[:part], group=group), device)

    small, large = gather(SMALL), gather(LARGE)
    found = torch.tensor([small, large], dtype=torch.float64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    small, large = found.tolist()
    received = (LARGE - SMALL) * share.element_size() * (ranks - 1) / ranks
    return small, received / max(large - small, 1e-9)


def _timed(work: Callable[[], object], device: torch.device) -> float:
    times = []
    for _ in range(TIMES):
        started = time.perf_counter()
        work()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        times.append(time.perf_counter() - started)
    return median(times)


def host_memory() -> int:
    """Return the bytes of the host that are free, less a tenth."""
    return int(free_ram().nbytes * 0.9)
