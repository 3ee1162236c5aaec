"""Holds what the referee has to know of the lower tier."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from stowage.stages.ir.machine import Link

NO_LINK = Link(1.0, 1.0, 1.0)
"""Stands for a link that no row takes."""


@dataclass(frozen=True)
class ReplayedTier:
    """The lower tier as the referee sees it: how fast it is, and how much room it has.

    Attributes:
        link: the link to it; needed by plans that offload.
        disk: the link between the host and the disk behind it, if there is one; what is on that disk takes both links.
        staging_bytes: device memory that it needs for itself, all the time.
        cpu_update_s: seconds of update nodes on the CPU; needed by plans in which the CPU updates.
        host_room_bytes: a plan is rejected if what is placed in the host needs more, with room for the largest update
            of what is on the disk, which is read into the host.
        disk_room_bytes: a plan is rejected if what is placed on the disk needs more.
    """

    link: Link = NO_LINK
    disk: Link | None = None
    staging_bytes: int = 0
    cpu_update_s: Mapping[int, float] = field(default_factory=dict)
    host_room_bytes: int | None = None
    disk_room_bytes: int | None = None


NO_TIER = ReplayedTier()
"""For plans that keep everything on the device."""
