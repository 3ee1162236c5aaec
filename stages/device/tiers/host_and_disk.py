"""Host memory and the disk behind it as one tier below a device: each slot has its place in one of them.

What is on the disk passes through buffers in the host that are allocated once (see `disk`); what is in the host never
waits for it. Transfers of one slot are all of one place, so its order is that of this place.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from stowage.stages.device.tiers.base import Span, Transfer
from stowage.stages.device.tiers.disk import DiskTier
from stowage.stages.device.tiers.host import PinnedTier


class HostAndDiskTier:
    """See `Tier` and `HostMemory`.

    Attributes:
        host, disk: the two places; both for tensors of the same device.
    """

    name = "staged"

    def __init__(self, host: PinnedTier, disk: DiskTier) -> None:
        self.host = host
        self.disk = disk
        self._on_disk: set[str] = set()
        self._in_host: set[str] = set()

    @property
    def record(self) -> bool:
        """See `Tier`."""
        return self.host.record

    @record.setter
    def record(self, value: bool) -> None:
        self.host.record = self.disk.record = value

    @property
    def memory_alignment(self) -> int:
        """See `Tier`."""
        return 0

    @property
    def staging_bytes(self) -> int:
        """See `Tier`."""
        return self.host.staging_bytes + self.disk.staging_bytes

    @property
    def host_bytes(self) -> int:
        """RAM: slots, and the buffers on the way to the disk."""
        return self.host.host_bytes + self.disk.host_bytes

    @property
    def spans(self) -> Sequence[Span]:
        """See `Tier`."""
        return sorted([*self.host.spans, *self.disk.spans], key=lambda span: span.end_s)

    def reserve(self, slots: Mapping[str, int], on_disk: Collection[str] = ()) -> None:
        """See `Tier`. A name that is there keeps its place."""
        there = {n for n in slots if n in self._on_disk or (n in on_disk and n not in self._in_host)}
        self.disk.reserve({n: b for n, b in slots.items() if n in there})
        self.host.reserve({n: b for n, b in slots.items() if n not in there})
        self._on_disk |= there
        self._in_host |= slots.keys() - there

    def release(self, names: Collection[str]) -> None:
        """See `Tier`."""
        self.disk.release([n for n in names if n in self._on_disk])
        self.host.release([n for n in names if n in self._in_host])
        self._on_disk.difference_update(names)
        self._in_host.difference_update(names)

    def _place(self, name: str) -> PinnedTier | DiskTier:
        return self.disk if name in self._on_disk else self.host

    def offload(self, name: str, tensor: torch.Tensor) -> Transfer:
        """See `Tier`."""
        return self._place(name).offload(name, tensor)

    def reload(self, name: str, tensor: torch.Tensor) -> Transfer:
        """See `Tier`."""
        return self._place(name).reload(name, tensor)

    def content(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """See `HostMemory`."""
        return self._place(name).content(name, like)

    def keep(self, name: str, tensor: torch.Tensor) -> None:
        """See `HostMemory`."""
        self._place(name).keep(name, tensor)

    def written(self, name: str) -> bool:
        """See `Tier`."""
        return self._place(name).written(name)

    def close(self) -> None:
        """See `Tier`."""
        self.host.close()
        self.disk.close()
