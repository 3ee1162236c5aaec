"""Describes and measures devices: what they are called, how fast they are, and what their allocators report.

- `base`: what a device can do.
- `cpu`, `cuda`: the two kinds of device.
- `choice`: finds the device of a name, and tells whether it is here.
- `allocator`: settings of PyTorch's allocator on a GPU.
- `events`: allocations and releases of a piece of work.
- `peaks`: peaks of the caching allocator of a GPU.
- `heap`: memory that the C library keeps for the process.
- `libraries`: memory that libraries take on a GPU.
- `switches`: switches of PyTorch that choose kernels.
- `native_log`: the log of PyTorch's C++ part.
- `tiers/`: places that tensors are offloaded to.
- `rates/`: rates of the disk and of the host's memory.
- `cards/`: descriptions of devices that are not here.
"""

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
