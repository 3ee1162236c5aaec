"""Devices: what they are called, how fast they are, and what their allocators say.

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
    """What measures on a device: `cpu`, `cuda` (the current one) or `cuda:1`.

    Raises:
        ParameterError: it is of another kind.
    """
    found = torch.device(device)
    if found.type == "cuda":
        return CudaDevice(found.index)
    if found.type == "cpu":
        return CpuDevice()
    raise ParameterError(f"The device is {found}: it must be a CPU or a CUDA device.")


def current(device: torch.device | None) -> AbstractContextManager[Any]:
    """A block in which a GPU is the current one: what names none is made there. Elsewhere it changes nothing."""
    if device is None or device.type != "cuda":
        return nullcontext()
    found: AbstractContextManager[Any] = torch.cuda.device(device)
    return found


def is_here(target: DeviceDescription) -> bool:
    """Whether this machine has that very device."""
    if target.type == "cuda" and not torch.cuda.is_available():
        return False
    return device_of(target.type).fingerprint() == target.fingerprint
