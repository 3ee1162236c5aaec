"""Pinned host memory as the lower tier of a GPU: buffers allocated once, a stream for each direction, and events.

Four rules of order make it correct; the host blocks in none of them.

- *Before an offload* its stream waits for the compute stream as it is at the call: the tensor must have been computed.
- *Before a reload* its stream waits for the compute stream as it is at the call too. The destination is new memory, but
  the caching allocator hands out memory whose last kernels may still be queued on the compute stream: without the event
  the copy overwrites what they read.
- *Between the two streams* events of the slot: a reload waits for its last offload, an offload for the reloads that
  still read the slot.
- *At the wait* the compute stream waits for the copy's event.

Memory: the allocator knows only the stream that a tensor was allocated on. A tensor freed while a side stream still
copies it would be handed out at once. `record_stream` would prevent that, but gives the memory back at some later time,
when the allocator next polls its events: the peak would no longer be the plan's. Instead the transfer refers to the
tensor until its wait; after that, whatever reuses the memory comes later on the compute stream, which has waited for
the copy.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from stowage.stages.device.tiers.base import OFFLOAD, RELOAD, HostMemory, Span, Stream
from stowage.stages.device.tiers.cuda_lanes import CudaLanes, DeviceLanes
from stowage.stages.device.tiers.grouping import group_allocations
from stowage.stages.device.tiers.layout import check_movable, flat_bytes, is_dense, packed
from stowage.stages.device.tiers.slots import Slots
from stowage.stages.ir.errors import PlanMismatchError

ALIGNMENT = 512
"""Alignment of slots in a buffer: copies are fastest between addresses aligned like the allocator's own."""


def pinned_bytes(nbytes: int) -> int:
    """Return the bytes that torch's allocator of pinned memory takes for a request: the next power of two."""
    return 1 << (nbytes - 1).bit_length() if nbytes else 0


@dataclass
class _Slot:
    """One name's bytes, the event of its last offload, and those of the reloads since.

    Attributes:
        form: the form of the dense tensor that was last written there.
        typed: the slot as a tensor of that form. The next tensor mostly has the same, and then needs fewer checks.
    """

    content: torch.Tensor
    written: Any = None
    read: list[Any] = field(default_factory=list)
    form: Any = None
    typed: torch.Tensor | None = None


class _PinnedTransfer:
    """A `Transfer` whose `wait` makes the caller's current stream wait; the host does not wait."""

    def __init__(self, tier: PinnedTier, stream: Stream, name: str, tensors: Sequence[torch.Tensor], done: Any) -> None:
        self._tier = tier
        self._stream: Stream = stream
        self.name = name
        self._tensors: Sequence[torch.Tensor] = tensors
        """The tensor, and its packed copy if there is one; referred to until the wait."""
        self._done = done

    def wait(self) -> None:
        """Implement `Transfer.wait`."""
        lanes = self._tier.lanes
        lanes.wait(lanes.compute(), self._done)
        if self._stream == RELOAD and len(self._tensors) == 2:
            tensor, contiguous = self._tensors
            lanes.copy(lanes.compute(), tensor.detach(), contiguous)
        self._tensors = ()
        self._tier._unwaited.discard(self)

    def done(self) -> bool:
        """Implement `Transfer.done`."""
        return self._tier.lanes.done(self._done)


class PinnedTier(HostMemory):
    """A `Tier` in pinned host memory, for tensors on one GPU.

    Attributes:
        lanes: streams and events.
    """

    name = "host"

    def __init__(
        self,
        device: torch.device | str = "cuda",
        *,
        groups: Sequence[Sequence[str]] = (),
        lanes: DeviceLanes | None = None,
    ) -> None:
        """Choose the device, and names that share one buffer.

        Args:
            device: the GPU.
            groups: names that share one buffer, in order. Buffers take the next power of two; other names are grouped
                so that little is wasted (see `grouping`).
            lanes: streams and events; None for the GPU's own.
        """
        self.record = False
        self.lanes: DeviceLanes = lanes or CudaLanes(torch.device(device))
        self._groups = {name: index for index, group in enumerate(groups) for name in group}
        self._order = {name: place for group in groups for place, name in enumerate(group)}
        self._slots = Slots()
        self._slot_of: dict[str, _Slot] = {}
        self._buffers: list[torch.Tensor] = []
        self._unwaited: set[_PinnedTransfer] = set()
        """Keeps tensors of transfers that the caller dropped without a wait."""
        self._recorded: list[tuple[Stream, str, int, Any, Any]] = []

    @property
    def memory_alignment(self) -> int:
        """Implement `Tier.memory_alignment`."""
        return 0

    @property
    def staging_bytes(self) -> int:
        """Return 0: the tier needs no memory on the device."""
        return 0

    @property
    def host_bytes(self) -> int:
        """Return the bytes of pinned memory taken, rounding included."""
        return sum(pinned_bytes(buffer.numel()) for buffer in self._buffers)

    @property
    def spans(self) -> Sequence[Span]:
        """Implement `Tier.spans`."""
        complete = [one for one in self._recorded if self.lanes.done(one[4])]
        spans = [Span(s, n, b, self.lanes.time_s(start), self.lanes.time_s(end)) for s, n, b, start, end in complete]
        return sorted(spans, key=lambda span: span.end_s)

    def reserve(self, slots: Mapping[str, int], on_disk: Collection[str] = ()) -> None:
        """Implement `Tier.reserve`; names of one group that come in one call share a buffer.

        Raises:
            PlanMismatchError: the placement of a slot is the disk, and there is none.
        """
        if on_disk:
            raise PlanMismatchError(
                f"The plan keeps '{next(iter(on_disk))}' on a disk behind the host, and offload_dir is empty: name the "
                "folder, or plan again."
            )
        new = self._slots.new(slots)
        shared: dict[int, list[str]] = {}
        for name in new:
            if name in self._groups:
                shared.setdefault(self._groups[name], []).append(name)
        rest = {name: -(-new[name] // ALIGNMENT) * ALIGNMENT for name in new if name not in self._groups}
        together = [list(allocation.names) for allocation in group_allocations(rest)]
        for names in [*shared.values(), *together]:
            names.sort(key=lambda name: self._order.get(name, 0))
            starts, end = [], 0
            for name in names:
                start = -(-end // ALIGNMENT) * ALIGNMENT
                starts.append(start)
                end = start + new[name]
            buffer = self.lanes.pinned(end)
            self._buffers.append(buffer)
            for name, start in zip(names, starts, strict=True):
                self._slot_of[name] = _Slot(buffer[start : start + new[name]])
                self._slots.add({name: new[name]})

    def release(self, names: Collection[str]) -> None:
        """Implement `Tier.release`; a buffer is freed when all its slots are released."""
        for name in names:
            slot = self._slot_of.pop(name, None)
            for event in [*([slot.written] if slot.written is not None else []), *slot.read] if slot else ():
                self.lanes.finish(event)
        self._slots.drop(names)
        alive = {slot.content.untyped_storage().data_ptr() for slot in self._slot_of.values()}
        kept = [buffer for buffer in self._buffers if buffer.untyped_storage().data_ptr() in alive]
        if len(kept) < len(self._buffers):
            self._buffers = kept
            self.lanes.give_back()

    def offload(self, name: str, tensor: torch.Tensor) -> _PinnedTransfer:
        """Implement `Tier.offload`."""
        slot = self._slot_of.get(name)
        if slot is None or not self._alike(slot, tensor):
            check_movable(name, tensor, (self.lanes.kind,))
            self._slots.write(name, tensor)
            slot = self._slot_of[name]
            self._remember(slot, tensor)
        if slot.typed is not None:
            alive, memory, content = [tensor], tensor.detach(), slot.typed
        else:
            alive = [tensor, packed(tensor)]
            memory = flat_bytes(alive[1])
            content = slot.content[: memory.numel()]
        after = [*slot.read, slot.written] if slot.written is not None else slot.read
        transfer = self._start(OFFLOAD, name, (content, memory), alive, after)
        slot.written, slot.read = transfer._done, []
        return transfer

    def reload(self, name: str, tensor: torch.Tensor) -> _PinnedTransfer:
        """Implement `Tier.reload`."""
        slot = self._slot_of.get(name)
        alive = [tensor]
        if slot is not None and self._alike(slot, tensor):
            assert slot.typed is not None
            memory, content = tensor.detach(), slot.typed
        else:
            check_movable(name, tensor, (self.lanes.kind,))
            self._slots.read(name, tensor)
            slot = self._slot_of[name]
            if not is_dense(tensor):
                alive.append(torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device))
            memory = flat_bytes(alive[-1].detach())
            content = slot.content[: memory.numel()]
        # The CPU's writes there are complete.
        after = [slot.written] if slot.written is not None else []
        transfer = self._start(RELOAD, name, (memory, content), alive, after)
        slot.read = [*(event for event in slot.read if not self.lanes.done(event)), transfer._done]
        return transfer

    def _alike(self, slot: _Slot, tensor: torch.Tensor) -> bool:
        """Return whether a tensor has plain memory of the form that the slot has, and was checked for."""
        return (
            slot.typed is not None
            and slot.form == (tensor.dtype, tensor.shape, tensor.stride())
            and tensor.device.type == self.lanes.kind
            and not (tensor.is_conj() or tensor.is_neg())
            and tensor.untyped_storage().nbytes() >= slot.typed.nbytes + tensor.storage_offset() * tensor.itemsize
        )

    @staticmethod
    def _remember(slot: _Slot, tensor: torch.Tensor) -> None:
        slot.form = slot.typed = None
        if is_dense(tensor):
            slot.form = (tensor.dtype, tensor.shape, tensor.stride())
            flat = slot.content[: tensor.nbytes].view(tensor.dtype)
            slot.typed = flat.as_strided(tensor.shape, tensor.stride())

    def content(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """Implement `HostMemory.content`; the host waits for the copies of the slot that are under way."""
        slot = self._slot_of[name]
        for event in [*([slot.written] if slot.written is not None else []), *slot.read]:
            self.lanes.finish(event)
        nbytes = like.numel() * like.element_size()
        view = slot.content[:nbytes].view(like.dtype).as_strided(like.shape, like.stride())
        self._slots.write(name, view)
        self._remember(slot, view)
        return view

    def written(self, name: str) -> bool:
        """Implement `Tier.written`."""
        return self._slots.written(name)

    def close(self) -> None:
        """Implement `Tier.close`; wait until both streams are idle, because they read and write the buffers."""
        self.lanes.synchronize()
        self._unwaited.clear()
        self._slot_of.clear()
        self._buffers.clear()
        self.lanes.give_back()

    def _start(
        self,
        stream: Stream,
        name: str,
        copy: tuple[torch.Tensor, torch.Tensor],
        alive: Sequence[torch.Tensor],
        after: Sequence[Any],
    ) -> _PinnedTransfer:
        """Put a copy on its stream, after the compute stream as it is now and after the events `after`.

        The copy goes to the first tensor of the pair from the second.
        """
        lanes, side = self.lanes, self.lanes.side(stream)
        lanes.wait(side, lanes.record(lanes.compute()))
        for event in after:
            lanes.wait(side, event)
        begin = lanes.record(side) if self.record else None
        lanes.copy(side, *copy)
        done = lanes.record(side)
        if begin is not None:
            self._recorded.append((stream, name, copy[0].nbytes, begin, done))
        transfer = _PinnedTransfer(self, stream, name, alive, done)
        self._unwaited.add(transfer)
        return transfer
