"""Measures, with all ranks of a group at once, what each gets of the host and of a disk, and remembers it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TypeVar

import torch

from stowage.stages.device.rates.at_once import RanksStopwatch
from stowage.stages.device.rates.disk import DiskRates, measure_disk, room_in
from stowage.stages.device.rates.host import HostCopies, MakeOptimizer
from stowage.stages.device.rates.shares import HostShares, give_back, measure_host_shares
from stowage.stages.runtime.sharding.agreement import together
from stowage.stages.runtime.sharding.ranks import Ranks

Found = TypeVar("Found")


def host_shares(
    ranks: Ranks,
    device: torch.device,
    folder: Path,
    make_optimizer: MakeOptimizer = torch.optim.AdamW,
    dtype: torch.dtype = torch.float32,
    key: str = "",
) -> HostShares:
    """Return a rank's shares of the host's memory and of the link to it, measured once; all ranks call it.

    Args:
        ranks: all of them.
        device: where this rank computes.
        folder: where rank 0 remembers them.
        make_optimizer: makes the optimizer that updates by the CPU, the same on all ranks.
        dtype: the type of what it updates.
        key: tells optimizers apart.

    Raises:
        StowageError: a rank has no memory for that; the others hear of it.
    """

    def measured() -> HostShares:
        copies = together(ranks, lambda: HostCopies(device))
        return _at_once(
            ranks,
            lambda stopwatch: measure_host_shares(ranks.group, device, copies, stopwatch, make_optimizer, dtype),
        )

    def measure() -> HostShares:
        try:
            return measured()
        finally:  # now that its copies are gone
            give_back(device)

    return ranks.measured(HostShares, measure, device, folder, f"host {key}")


def disk_shares(ranks: Ranks, device: torch.device, folder: Path, disk: Path) -> DiskRates:
    """Return a rank's shares of the disk of a folder, measured once; all ranks call it, each with a folder of its own.

    Raises:
        UnwritableError: there is no room for a rank's file; the others hear of it.
    """

    def begin() -> None:
        with room_in(str(disk)):
            disk.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=disk).close()

    def measure() -> DiskRates:
        together(ranks, begin)
        return _at_once(ranks, lambda stopwatch: measure_disk(str(disk), stopwatch), room_in(str(disk)))

    return ranks.measured(DiskRates, measure, device, folder, "disk")


def _at_once(
    ranks: Ranks,
    measure: Callable[[RanksStopwatch], Found],
    said: AbstractContextManager[None] | None = None,
) -> Found:
    """Measure on all ranks; where one has failed, raise on all after that, on that one as `said` turns its error."""
    stopwatch = RanksStopwatch(ranks.group, ranks.place())
    with ranks.failures.named("probes of the rates of the host"):
        found = measure(stopwatch)

    def check() -> None:
        with said or nullcontext():
            stopwatch.check()

    together(ranks, check)
    return found
