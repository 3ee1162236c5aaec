"""Devices: what they are called, how fast they are, and what their allocators say.

`python -m stowage.stages.device` measures this machine and writes `artifacts/device.json`, the target of planning.
"""

from __future__ import annotations

from stowage.stages.device.base import Device
from stowage.stages.device.cpu import CpuDevice
from stowage.stages.device.cuda import CudaDevice
from stowage.stages.device.events import AllocatorEvent, Measured, measure_allocations, unique_bytes

__all__ = ["AllocatorEvent", "Device", "Measured", "device_of", "measure_allocations", "unique_bytes"]


def device_of(kind: str) -> Device:
    """The device of a kind: `cpu` or `cuda`."""
    return CudaDevice() if kind == "cuda" else CpuDevice()
