"""Host memory and the disk behind it as one lower tier: each slot is placed in one of them.

What is on the disk passes through buffers in the host that are allocated once (see `disk`); what is in the host never
waits for it. All transfers of one slot have the same placement, so that place keeps their order.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from stowage.stages.device.tiers.base import Span, Transfer
from stowage.stages.device.tiers.disk import DiskTier
from stowage.stages.device.tiers.host import PinnedTier


class HostAndDiskTier:
    """A `Tier` and `HostMemory` of two places.

    Attributes:
        host, disk: the two places; both for tensors of the same device.
    """

    name = "host and disk"

    def __init__(self, host: PinnedTier, disk: DiskTier) -> None:
        self.host = host
        self.disk = disk
        self._on_disk: set[str] = set()
        self._in_host: set[str] = set()

    @property
    def record(self) -> bool:
        """Implement `Tier.record`."""
        return self.host.record

    @record.setter
    def record(self, value: bool) -> None:
        self.host.record = self.disk.record = value

    @property
    def memory_alignment(self) -> int:
        """Implement `Tier.memory_alignment`."""
        return 0

    @property
    def staging_bytes(self) -> int:
        """Implement `Tier.staging_bytes`."""
        return self.host.staging_bytes + self.disk.staging_bytes

    @property
    def host_bytes(self) -> int:
        """Return the RAM of slots, and of the buffers on the way to the disk."""
        return self.host.host_bytes + self.disk.host_bytes

    @property
    def spans(self) -> Sequence[Span]:
        """Implement `Tier.spans`."""
        return sorted([*self.host.spans, *self.disk.spans], key=lambda span: span.end_s)

    def reserve(self, slots: Mapping[str, int], on_disk: Collection[str] = ()) -> None:
        """Implement `Tier.reserve`; a name that is reserved already keeps its place."""
        there = {n for n in slots if n in self._on_disk or (n in on_disk and n not in self._in_host)}
        self.disk.reserve({n: b for n, b in slots.items() if n in there})
        self.host.reserve({n: b for n, b in slots.items() if n not in there})
        self._on_disk |= there
        self._in_host |= slots.keys() - there

    def release(self, names: Collection[str]) -> None:
        """Implement `Tier.release`."""
        self.disk.release([n for n in names if n in self._on_disk])
        self.host.release([n for n in names if n in self._in_host])
        self._on_disk.difference_update(names)
        self._in_host.difference_update(names)

    def _place(self, name: str) -> PinnedTier | DiskTier:
        return self.disk if name in self._on_disk else self.host

    def offload(self, name: str, tensor: torch.Tensor) -> Transfer:
        """Implement `Tier.offload`."""
        return self._place(name).offload(name, tensor)

    def reload(self, name: str, tensor: torch.Tensor) -> Transfer:
        """Implement `Tier.reload`."""
        return self._place(name).reload(name, tensor)

    def content(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """Implement `HostMemory.content`."""
        return self._place(name).content(name, like)

    def keep(self, name: str, tensor: torch.Tensor) -> None:
        """Implement `HostMemory.keep`."""
        self._place(name).keep(name, tensor)

    def written(self, name: str) -> bool:
        """Implement `Tier.written`."""
        return self._place(name).written(name)

    def close(self) -> None:
        """Implement `Tier.close`."""
        self.host.close()
        self.disk.close()
