"""What `profile` measures: costs of distinct calls and rates of a device."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields
from typing import Literal

MOST = 1e18
"""Of bytes, and of anything per second, on one device."""


@dataclass(frozen=True)
class Cost:
    """Cost of one distinct call on one device.

    Attributes:
        signature: of the call (see `Call.signature`).
        device: fingerprint of the device.
        time_s: mean time, seconds.
        output_bytes: bytes of storages it creates.
        workspace_bytes: peak bytes above inputs and outputs, from the allocator's events.
        samples: number of timed executions; 0 for an estimate.
        source: `measured`; `roofline` when estimated from bytes, flops and the device's rates; `similar` when taken
            from other sizes of the same operator (see `profile.similar`), which no store keeps.
    """

    signature: str
    device: str
    time_s: float
    output_bytes: int
    workspace_bytes: int
    samples: int
    source: Literal["measured", "roofline", "similar"]

    def is_possible(self) -> bool:
        """No call takes less than nothing, or for ever."""
        return 0 <= self.time_s < math.inf and self.output_bytes >= 0 and self.workspace_bytes >= 0

    def is_measured(self, samples: int = 1) -> bool:
        """By so many timed executions at least."""
        return self.source == "measured" and self.samples >= samples


@dataclass(frozen=True)
class Returned:
    """What one distinct call returns on one device.

    Attributes:
        signature: of the call (see `Call.signature`).
        outputs: one for each output, "" where it is no tensor: type, shape, strides, offset, bytes of its storage, and
            the positions of the argument and of the earlier output whose storage it shares, -1 for none.
    """

    signature: str
    outputs: tuple[str, ...]


ROUNDING_BYTES = 512
"""What PyTorch's allocator on a GPU rounds up to."""

FRAGMENTS = 0.02
"""Of a budget: memory that a GPU's allocator holds and cannot give. With expandable segments it is what is left of
pages; the part has not been measured yet."""


@dataclass(frozen=True)
class DeviceDescription:
    """A device and its rates; `artifacts/device.json` names the target.

    Attributes:
        fingerprint: hash of what identifies it.
        name: for people.
        type: `cpu` or `cuda`.
        memory_bytes: of the device tier.
        flops_per_s: of a large float32 matrix product.
        memory_copy_bytes_per_s: read + write inside the device tier.
        disk_read_bytes_per_s, disk_write_bytes_per_s: one at a time.
        disk_duplex_bytes_per_s: both directions at once, summed.
        update_bytes_per_s: bytes that an AdamW update reads and writes per second.
        dispatch_s: time of a call that does no work.
        offload_bytes_per_s, reload_bytes_per_s: to and from pinned host memory, one at a time; 0 without a host tier.
        duplex_bytes_per_s: both at once, summed.
        cpu_update_bytes_per_s: bytes that an AdamW update in host memory reads and writes per second, beside copies; 0
            where the CPU is the device itself.
        library_bytes: of the device, what libraries such as cuBLAS keep from the allocator.
        context_bytes: of the device, in use outside of the allocator when it was measured; a budget does not count it.
    """

    fingerprint: str
    name: str
    type: Literal["cpu", "cuda"]
    memory_bytes: int
    flops_per_s: float
    memory_copy_bytes_per_s: float
    disk_read_bytes_per_s: float
    disk_write_bytes_per_s: float
    disk_duplex_bytes_per_s: float
    update_bytes_per_s: float
    dispatch_s: float
    offload_bytes_per_s: float = 0.0
    reload_bytes_per_s: float = 0.0
    duplex_bytes_per_s: float = 0.0
    cpu_update_bytes_per_s: float = 0.0
    library_bytes: int = 0
    context_bytes: int = 0

    def reserve_bytes(self, budget_bytes: int, storages: int) -> int:
        """Of a budget, what a plan must leave to the device's allocator: on a GPU the workspaces of libraries, what
        rounding adds to each storage, and a part for pieces of memory that are between tensors and too small.

        Args:
            budget_bytes: of the device.
            storages: that the program has.
        """
        if self.type == "cpu" or not self.library_bytes:  # every byte there is counted; or nothing is known
            return 0
        return self.library_bytes + ROUNDING_BYTES * storages + int(FRAGMENTS * budget_bytes)

    def __post_init__(self) -> None:
        """Raise ValueError for what no device is."""
        if re.fullmatch(r"[A-Za-z0-9][\w.+-]{0,120}", self.fingerprint, re.ASCII) is None:
            raise ValueError(f"fingerprint is {self.fingerprint!r}, which is none")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("fingerprint", "name", "type"):
                continue
            if not (0 < value < MOST or (value == 0 and field.default == 0.0)):
                raise ValueError(f"{field.name} is {value!r}, which no device has")
