"""Devices: what they are called, how fast they are, and what their allocators say."""

from stowage.stages.device.base import Clock, Device
from stowage.stages.device.choice import current, device_of, is_here
from stowage.stages.device.events import AllocatorEvent, Measured, measure_allocations, unique_bytes

__all__ = [
    "AllocatorEvent",
    "Clock",
    "Device",
    "Measured",
    "current",
    "device_of",
    "is_here",
    "measure_allocations",
    "unique_bytes",
]
