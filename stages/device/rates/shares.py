"""Measures what one rank gets of the host, its link and its disk while all ranks of a group use them at once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from stowage.stages.device.rates.at_once import RanksStopwatch, Stopwatch
from stowage.stages.device.rates.collectives import among_processes, collectives_wait_for
from stowage.stages.device.rates.disk import DiskRates, measure_disk
from stowage.stages.device.rates.host import HostCopies, HostRates, MakeOptimizer, give_back_pinned, measure_copies
from stowage.stages.ir.costs import DeviceDescription


@dataclass(frozen=True)
class HostShares(HostRates):
    """The rates of the host's memory that each rank has while all use it, in bytes per second.

    Attributes:
        collectives_share_link: collectives pass over the link that these copies use.
    """

    collectives_share_link: bool = False


def measure_host_shares(
    group: Any,
    device: torch.device,
    copies: HostCopies,
    stopwatch: Stopwatch,
    make_optimizer: MakeOptimizer = torch.optim.AdamW,
    dtype: torch.dtype = torch.float32,
) -> HostShares:
    """Return a rank's shares of the host; all ranks call it, and get the same rates.

    Args:
        group: the ranks.
        device: where this rank computes.
        copies: this rank's copies.
        stopwatch: times all ranks.
        make_optimizer: makes the optimizer that updates.
        dtype: the type of what it updates.
    """
    rates = measure_copies(copies, make_optimizer, dtype, stopwatch)
    # On a CPU nothing but its memory carries either, and no copy runs beside what computes.
    shared = device.type == "cuda" and collectives_wait_for(group, device, copies.beside)
    copies.wait()
    return HostShares(rates.offload, rates.reload, rates.duplex, rates.update, shared)


def give_back(device: torch.device) -> None:
    """Give memory back that was measured with."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        give_back_pinned()


def with_shares(
    target: DeviceDescription, host: HostShares | None = None, disk: DiskRates | None = None
) -> DeviceDescription:
    """Return a description that knows a rank's shares; `DeviceDescription.among` uses them."""
    if host is not None:
        target = replace(
            target,
            share_offload_bytes_per_s=host.offload,
            share_reload_bytes_per_s=host.reload,
            share_duplex_bytes_per_s=host.duplex,
            share_cpu_update_bytes_per_s=host.update,
            collectives_share_link=host.collectives_share_link,
        )
    if disk is not None:
        target = replace(
            target,
            share_disk_read_bytes_per_s=disk.read_bytes_per_s,
            share_disk_write_bytes_per_s=disk.write_bytes_per_s,
            share_disk_duplex_bytes_per_s=disk.duplex_bytes_per_s,
        )
    return target


def shares_of_processes(kind: str, ranks: int, folder: str) -> tuple[HostShares | None, DiskRates]:
    """Start so many processes on this machine's devices, and return the shares of each; of a CPU's memory none.

    Raises:
        StowageError: see `among_processes`.
    """
    disk = among_processes(kind, ranks, DiskRates, partial(_disk_as_one, folder))
    return among_processes(kind, ranks, HostShares, _host_as_one) if kind == "cuda" else None, disk


def _host_as_one(device: torch.device) -> HostShares:
    stopwatch = RanksStopwatch(None, device)
    found = measure_host_shares(None, device, HostCopies(device), stopwatch)
    stopwatch.check()
    return found


def _disk_as_one(folder: str, device: torch.device) -> DiskRates:
    stopwatch = RanksStopwatch(None, device)
    found = measure_disk(folder, stopwatch)
    stopwatch.check()
    return found
