"""Describes the lower tier as the planner sees it: rates, room, and what may be offloaded."""

from __future__ import annotations

from dataclasses import dataclass, replace

from stowage.stages.ir.machine import BehindHost, Link, Placement

UNLIMITED_BYTES = 1 << 60


@dataclass(frozen=True)
class LowerTier:
    """The lower tier, and the disk behind it if there is one.

    Attributes:
        link: the link to it.
        capacity_bytes: room in it.
        placement: `host` or `disk`.
        disk: the disk behind the host.
        staging_bytes: device memory that it needs for itself.
        padding_bytes: device memory that each tensor which leaves takes besides: what its copy is rounded up to, and
            what stands for it while it is away.
        cpu_update_bytes_per_s: bytes that an update by the CPU reads and writes per second, beside everything else; 0
            where the CPU is the device itself.
        dispatch_s: what starting an operation costs the CPU, which updates nothing meanwhile.
        activations: whether they may be offloaded too.
        gradients: whether gradients that wait for a later micro-batch may be offloaded between the two.
        smallest_bytes: smaller parameters and states stay on the device: each copy costs something besides its bytes.
    """

    link: Link
    capacity_bytes: int
    staging_bytes: int = 0
    padding_bytes: int = 0
    smallest_bytes: int = 1 << 16
    cpu_update_bytes_per_s: float = 0.0
    dispatch_s: float = 0.0
    activations: bool = True
    gradients: bool = False
    placement: Placement = "host"
    disk: BehindHost | None = None

    @property
    def disk_room_bytes(self) -> int | None:
        """Return the room on whichever disk there is, or None without one."""
        if self.disk is not None:
            return self.disk.capacity_bytes
        return self.capacity_bytes if self.placement == "disk" else None

    @property
    def host_room_bytes(self) -> int | None:
        """Return the room in the host, or None where the tier is a disk."""
        return self.capacity_bytes if self.placement == "host" else None

    def staging_for(self, leaving: int) -> int:
        """Return the device memory that it needs for itself, and for so many tensors that leave the device."""
        return self.staging_bytes + leaving * self.padding_bytes

    def boundless(self) -> LowerTier:
        """Return the same tier with room for anything."""
        disk = replace(self.disk, capacity_bytes=UNLIMITED_BYTES) if self.disk is not None else None
        return replace(self, capacity_bytes=UNLIMITED_BYTES, disk=disk)

    def lasting(self) -> LowerTier:
        """Return the same tier without the limit of a disk's free room, which changes from minute to minute."""
        if self.disk is not None:
            return replace(self, disk=replace(self.disk, capacity_bytes=0))
        return replace(self, capacity_bytes=0) if self.placement == "disk" else self
