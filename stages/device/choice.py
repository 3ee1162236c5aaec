"""Finds the device that a name means, and compares it with the target of planning.

`python -m stowage.stages.device` measures this machine and writes `artifacts/device.json`, the target of planning.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from stowage.stages.device.base import Device
from stowage.stages.device.cpu import CpuDevice
from stowage.stages.device.cuda import CudaDevice
from stowage.stages.ir.costs import DeviceDescription
from stowage.stages.ir.errors import ParameterError


def device_of(device: str | torch.device) -> Device:
    """Return the device of a name: `cpu`, `cuda` (the current one) or `cuda:1`.

    Raises:
        ParameterError: it is neither a CPU nor a CUDA device.
    """
    found = torch.device(device)
    if found.type == "cuda":
        return CudaDevice(found.index)
    if found.type == "cpu":
        return CpuDevice()
    raise ParameterError(f"The device is {found}: it must be a CPU or a CUDA device.")


def current(device: torch.device | None) -> AbstractContextManager[Any]:
    """Make a GPU the current one inside, so that tensors without a device are made there; others change nothing."""
    if device is None or device.type != "cuda":
        return nullcontext()
    found: AbstractContextManager[Any] = torch.cuda.device(device)
    return found


def is_here(target: DeviceDescription) -> bool:
    """Return whether this machine has that very device."""
    if target.type == "cuda" and not torch.cuda.is_available():
        return False
    return device_of(target.type).fingerprint() == target.fingerprint
