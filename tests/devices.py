"""Descriptions of this machine with made-up rates, so that nothing is measured and plans are the same everywhere."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from stowage.stages.device import device_of
from stowage.stages.ir.costs import DeviceDescription
from stowage.stages.ir.table import write_record

COMPUTING_COSTS_MOST = {"flops_per_s": 1e8, "memory_copy_bytes_per_s": 1e11, "dispatch_s": 1e-8}
"""It computes slowly and copies fast, so that codes are cheaper than computing again."""

GATHERS_LIKE_FORWARD = {
    "flops_per_s": 5e10,
    "update_bytes_per_s": 5e9,
    "collective_bytes_per_s": 2e9,
    "collective_s": 2e-5,
}
"""A gather of a small layer takes about as long as its forward."""


def made_up_cpu(**rates: Any) -> DeviceDescription:
    """This machine's CPU, all rates alike but for those that are given."""
    here = device_of("cpu").fingerprint()
    return replace(DeviceDescription(here, "here", "cpu", 1 << 34, 1e10, 1e10, 1e9, 1e9, 1e9, 1e9, 1e-6), **rates)


def write_device(folder: Path, **rates: Any) -> None:
    """Write it as the target of the project in a folder."""
    write_record(folder / "artifacts" / "device.json", made_up_cpu(**rates))
