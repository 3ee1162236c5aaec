"""Devices: what they are called, how fast they are, and what their allocators say.

`python -m stowage.stages.device` measures this machine and writes `artifacts/device.json`, the target of planning.
"""

from __future__ import annotations

import torch

from stowage.stages.device.base import Device
from stowage.stages.device.cpu import CpuDevice
from stowage.stages.device.cuda import CudaDevice
from stowage.stages.device.events import AllocatorEvent, Measured, measure_allocations, unique_bytes
from stowage.stages.ir.costs import DeviceDescription

__all__ = ["AllocatorEvent", "Device", "Measured", "device_of", "is_here", "measure_allocations", "unique_bytes"]


def device_of(kind: str) -> Device:
    """The device of a kind: `cpu` or `cuda`."""
    return CudaDevice() if kind == "cuda" else CpuDevice()


def is_here(target: DeviceDescription) -> bool:
    """Whether this machine has that very device."""
    if target.type == "cuda" and not torch.cuda.is_available():
        return False
    return device_of(target.type).fingerprint() == target.fingerprint
