"""Measures how fast the CPU updates parameters in the lower tier of a GPU, with the optimizer that trains.

The description of a device knows the rate of AdamW alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from stowage.stages.device.rates.host import measure_host_rates, measure_update_rate
from stowage.stages.device.rates.shares import with_shares
from stowage.stages.ir.costs import DeviceDescription
from stowage.stages.ir.errors import StowageError, TableError
from stowage.stages.ir.table import read_record, write_record
from stowage.stages.optimizers import twin_of
from stowage.stages.runtime.sharding.ranks import Ranks
from stowage.stages.runtime.sharding.shares import disk_shares, host_shares

FEW = 1 << 10
"""Elements of a tensor that shows whether an optimizer updates it by itself."""

_REFUSALS = (StowageError, RuntimeError, TypeError, ValueError, AssertionError)


@dataclass(frozen=True)
class UpdateRate:
    """The rate of CPU updates.

    Attributes:
        bytes_per_s: bytes read and written per second; see `measure_update_rate`.
    """

    bytes_per_s: float


def with_own_updates(
    target: DeviceDescription, optimizer: torch.optim.Optimizer | None, device: torch.device, stores: Path
) -> DeviceDescription:
    """Return the description with the rate of this optimizer's updates, measured once and remembered.

    An optimizer that does not update one tensor of any shape leaves the description as it is.
    """
    if target.type != "cuda" or optimizer is None:
        return target
    parameter = _first(optimizer)
    if parameter is None:
        return target
    path = stores / "devices" / f"{target.fingerprint}.{_key(optimizer, parameter)}.json"
    try:
        rate = read_record(path, UpdateRate)
    except TableError:
        try:
            rate = UpdateRate(measure_host_rates(device, _maker(optimizer, parameter), parameter.dtype).update)
        except _REFUSALS:
            return target
        write_record(path, rate)
    return replace(target, cpu_update_bytes_per_s=rate.bytes_per_s)


def with_shares_of_ranks(
    target: DeviceDescription,
    optimizer: torch.optim.Optimizer | None,
    device: torch.device,
    stores: Path,
    ranks: Ranks,
    *,
    host: bool,
    disk: bool,
) -> DeviceDescription:
    """Return the description with what one rank gets of the lower tier while all ranks use it; all call this together.

    Args:
        target: the description of this rank's device.
        optimizer: what updates; AdamW stands for one that does not update one tensor of any shape.
        device: where this rank computes.
        stores: the folder of this rank's stores; the disk is measured there, as that of one process is.
        ranks: all of them.
        host: whether the lower tier is, or begins with, memory of the host behind a GPU.
        disk: whether the lower tier has a disk.

    Raises:
        StowageError: it cannot be measured on a rank; the others hear of it.
    """
    folder = stores / "devices"
    shares = None
    if host and target.type == "cuda":
        own = _own(optimizer) if optimizer is not None else ()
        shares = host_shares(ranks, device, folder, *own)
    room = disk_shares(ranks, device, folder, stores) if disk else None
    return with_shares(target, shares, room).among(ranks.count)


def _own(optimizer: torch.optim.Optimizer) -> tuple[Any, ...]:
    """Return how updates of this optimizer are made, for `host_shares`; nothing where it refuses a tensor by itself."""
    parameter = _first(optimizer)
    if parameter is None:
        return ()
    make = _maker(optimizer, parameter)
    try:
        measure_update_rate(make, parameter.dtype, elements=FEW)
    except _REFUSALS:
        return ()
    return make, parameter.dtype, _key(optimizer, parameter)


def _first(optimizer: torch.optim.Optimizer) -> torch.Tensor | None:
    return next((p for group in optimizer.param_groups for p in group["params"]), None)


def _maker(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> Any:
    def make(parameters: Iterable[Any]) -> torch.optim.Optimizer:
        (stand_in,) = parameters
        twin = twin_of(optimizer, {id(parameter): stand_in})
        for group in twin.param_groups:
            if "capturable" in group:  # CPU updates run without it too
                group["capturable"] = False
        return twin

    return make


def _key(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> str:
    """Return a digest of class, switches and dtype; numbers do not change what is read and written."""
    kind = type(optimizer)
    group = next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
    switches = {k: v for k, v in group.items() if v is None or isinstance(v, (bool, str))}
    text = json.dumps([kind.__module__, kind.__qualname__, str(parameter.dtype), sorted(switches.items())])
    return hashlib.sha256(text.encode()).hexdigest()[:12]
