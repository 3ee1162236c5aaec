"""Describes the lower tier to the planner: rates of the target, and limits that people set."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from stowage.stages.ir.costs import DeviceDescription
from stowage.stages.ir.errors import ParameterError, size_text
from stowage.stages.ir.machine import DISK_ALIGNMENT_BYTES, DISK_STAGING_BYTES, BehindHost, Link
from stowage.stages.settings.sizes import parse_bytes
from stowage.stages.solve.offload.tier import LowerTier


def lower_tier_of(
    target: DeviceDescription,
    *,
    host_budget: str | int | None,
    disk_budget: str | int | None,
    offload_dir: str | Path | None,
    method: str = "auto",
    section: str = "",
    names: Mapping[str, str] | None = None,
    here: bool = True,
) -> LowerTier | None:
    """Return the tier that a plan may use: a disk for a CPU; for a GPU pinned host memory, and the disk behind it.

    Args:
        target: the device.
        host_budget: the budget of pinned host memory, as `fit` and `params.yaml` have it.
        disk_budget: the budget of the disk, likewise.
        offload_dir: the folder on the disk, likewise.
        method: the method of planning, likewise.
        section: what precedes their names in messages, `solve.`.
        names: what messages call them instead, by their names.
        here: whether `offload_dir` is a folder of this machine, which is looked at; else `disk_budget` alone limits it.

    Returns:
        The tier; None without any.

    Raises:
        ParameterError: they do not fit each other or the device, or the folder cannot be used.
    """

    def key(name: str) -> str:
        return section + (names or {}).get(name, name)

    if method == "offmate" and host_budget is None and offload_dir is None:
        needed = key("offload_dir") if target.type == "cpu" else key("host_budget")
        raise ParameterError(f"{key('method')} offmate needs a lower tier: give {needed}.")
    if target.type == "cpu" and host_budget is not None:
        raise ParameterError(
            f"{key('host_budget')} is for models on a GPU: on the CPU the device tier is the RAM itself, which "
            f"{key('device_budget')} limits; give {key('offload_dir')} (and {key('disk_budget')}) to use the disk "
            "behind it."
        )
    disk = _disk(target, disk_budget, offload_dir, key, here=here)
    if target.type == "cpu":
        if disk is None:
            return None
        return LowerTier(disk.link, disk.capacity_bytes, DISK_STAGING_BYTES, DISK_ALIGNMENT_BYTES, placement="disk")
    if host_budget is None:
        if disk is not None:
            raise ParameterError(
                f"{key('offload_dir')} needs {key('host_budget')} on a GPU: what moves between the GPU and a disk "
                f"passes through pinned memory of the host, so give {key('host_budget')} too."
            )
        return None
    if not target.offload_bytes_per_s:
        raise ParameterError(
            f"{key('host_budget')} needs the rates of pinned host memory, which are not known of {target.name}: "
            "measure the device again (`python -m stowage.stages.device cuda`)."
        )
    room = parse_bytes(host_budget, key("host_budget")) - (DISK_STAGING_BYTES if disk is not None else 0)
    if room < 0:
        raise ParameterError(
            f"{key('host_budget')} is too small for the buffers through which the disk is reached: give at least "
            f"{size_text(DISK_STAGING_BYTES)}."
        )
    link = Link(
        target.offload_bytes_per_s,
        target.reload_bytes_per_s,
        target.duplex_bytes_per_s,
        carries_collectives=target.collectives_share_link,
    )
    rate = target.cpu_update_bytes_per_s
    return LowerTier(link, room, cpu_update_bytes_per_s=rate, dispatch_s=target.dispatch_s, disk=disk)


def _disk(
    target: DeviceDescription,
    disk_budget: str | int | None,
    offload_dir: str | Path | None,
    key: Callable[[str], str],
    *,
    here: bool,
) -> BehindHost | None:
    if offload_dir is None:
        if disk_budget is not None:
            raise ParameterError(
                f"{key('disk_budget')} needs {key('offload_dir')}: name the folder in which offloaded tensors live."
            )
        return None
    allowed = None if disk_budget is None else parse_bytes(disk_budget, key("disk_budget"))
    rooms = [] if allowed is None else [allowed]
    if here or allowed is None:
        rooms.append(room_in(Path(offload_dir), key("offload_dir")))
    link = Link(target.disk_write_bytes_per_s, target.disk_read_bytes_per_s, target.disk_duplex_bytes_per_s)
    return BehindHost(link, min(rooms))


def room_in(folder: Path, key: str = "offload_dir") -> int:
    """Return the free bytes of a folder, which is made if it is not there.

    Raises:
        ParameterError: it cannot be made or written to; `key` names it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise ParameterError(f"{key} '{folder}' cannot be used: {error.strerror}; choose another folder.") from error
    if not os.access(folder, os.W_OK):
        raise ParameterError(f"{key} '{folder}' is not writable; choose another folder.")
    return free
