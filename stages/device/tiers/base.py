"""Defines a tier: three verbs, and what goes wrong without each wait."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

Stream = Literal["offload", "reload"]
OFFLOAD: Stream = "offload"
RELOAD: Stream = "reload"


@dataclass(frozen=True)
class Span:
    """One transfer as it happened, on the clock of `time.perf_counter`.

    Attributes:
        stream: `offload` or `reload`.
        name: the name of the slot.
        nbytes: the bytes transferred.
        start_s: when its first byte was asked for, after everything that it had to wait for.
        end_s: when it was complete.
    """

    stream: Stream
    name: str
    nbytes: int
    start_s: float
    end_s: float


class Transfer(Protocol):
    """A copy under way. The tier refers to the tensor until the copy is complete, and no longer than the wait."""

    def wait(self) -> None:
        """Return when the compute stream may rely on the copy.

        After an offload the tensor may be written or freed. Without the wait the slot may get bytes of later, and
        memory counts as free that is still in use. After a reload the tensor may be read, written and freed. Without
        the wait its bytes are undefined.

        Raises:
            StowageError: the copy failed; the sentence names the tensor and the file.
        """
        ...

    def done(self) -> bool:
        """Return whether `wait` would return at once. It does not replace the wait."""
        ...


class HostMemory(Protocol):
    """A tier whose slots the CPU can compute on, for updates by the CPU."""

    def content(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """Return the slot, or a copy of it in RAM, as a tensor laid out as `like` (a meta tensor will do).

        It waits for the copies of the slot that are under way.
        """
        ...

    def keep(self, name: str, tensor: torch.Tensor) -> None:
        """Store `tensor`, which is in RAM, in the slot; nothing is copied if it is the slot itself."""
        content = self.content(name, tensor)
        if content.data_ptr() != tensor.data_ptr():
            content.copy_(tensor)


class Tier(Protocol):
    """A lower tier, with one slot of fixed size for each name.

    Both streams run at the same time. Transfers of one stream that have the same placement run in the order of their
    calls. Transfers of one slot run in the order of their calls across both streams: a reload sees what was offloaded
    before it, and an offload waits for the reloads before it. Two transfers of different slots that touch the same
    tensor memory are not ordered: that is what waits are for.

    Attributes:
        name: `disk`, `host`, `host and disk` or `null`.
        record: whether to append a `Span` for each transfer.
    """

    name: str
    record: bool

    @property
    def memory_alignment(self) -> int:
        """Return the alignment with which tensors are reloaded without a copy on the way; 0 if it does not matter."""
        ...

    @property
    def staging_bytes(self) -> int:
        """Return the device memory that the tier needs for itself, which the budget must count."""
        ...

    @property
    def spans(self) -> Sequence[Span]:
        """Return the transfers that were completed while `record` was on, in the order of completion."""
        ...

    def reserve(self, slots: Mapping[str, int], on_disk: Collection[str] = ()) -> None:
        """Make room for slots before the first step; later calls add names.

        Args:
            slots: name → bytes.
            on_disk: slots whose placement is the disk; a tier that is a single place puts all of them there.

        Raises:
            StowageError: there is not enough room; the sentence says how many bytes are missing and where.
        """
        ...

    def release(self, names: Collection[str]) -> None:
        """Give up slots that nobody will use any more; no transfer of them is under way.

        Their room serves others, or goes back to the system once everything reserved together with it is released.
        """
        ...

    def offload(self, name: str, tensor: torch.Tensor) -> Transfer:
        """Start copying a tensor into its slot."""
        ...

    def reload(self, name: str, tensor: torch.Tensor) -> Transfer:
        """Start copying a slot into `tensor`, which the caller allocated, with the layout of what was offloaded."""
        ...

    def written(self, name: str) -> bool:
        """Return whether the slot has data, or will have once the offload under way is complete."""
        ...

    def close(self) -> None:
        """Give back what the tier has taken. Transfers that are not complete fail."""
        ...
