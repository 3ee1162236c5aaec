"""A disk as a tier: one preallocated file, read and written past the page cache.

The page cache would be memory outside the budget, and a cgroup counts it; so there is direct I/O, through page-aligned
staging buffers that the budget counts. Copies between staging and tensors and the I/O itself run in threads, outside
the GIL. Tensors in RAM that are aligned as the file system asks (`memory_alignment`) need no staging copy.

Tensors of a GPU go through pinned staging buffers, allocated once: a thread puts the copy of a chunk on a side stream,
after the compute stream as it was at the call, waits until it is done, and writes the chunk; or reads first and copies
then. A transfer that is done is done for every stream, so its wait is the host's.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import weakref
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path

import torch

from stowage.stages.device.tiers.base import OFFLOAD, RELOAD, Span, Stream, Transfer
from stowage.stages.device.tiers.cuda_lanes import DeviceLanes
from stowage.stages.device.tiers.disk_file import PAGE, open_best, open_file
from stowage.stages.device.tiers.disk_mover import Mover
from stowage.stages.device.tiers.lanes import LaneJob, Lanes, Staging
from stowage.stages.device.tiers.layout import check_movable, is_dense, packed
from stowage.stages.device.tiers.slots import Slots
from stowage.stages.ir.errors import StowageError, size_text
from stowage.stages.ir.machine import DISK_CHUNK_BYTES, DISK_THREADS


class DiskTier:
    """A `Tier` on a disk, for tensors in RAM, or on the device of `lanes`.

    Attributes:
        folder: the folder that the file is in.
        path: the file's path; None unless `keep`: a file without a name cannot be left behind.
        memory_alignment: alignment of tensors that go to the disk without a copy; 0 where there is no direct I/O.
        direct: whether the page cache is bypassed.
        note: one sentence that says why the page cache is not bypassed, else empty.
    """

    name = "disk"

    def __init__(
        self,
        folder: str | Path,
        *,
        chunk_bytes: int = DISK_CHUNK_BYTES,
        threads: int = DISK_THREADS,
        keep: bool = False,
        direct: bool = True,
        lanes: DeviceLanes | None = None,
    ) -> None:
        """Make the file and start the threads.

        Args:
            folder: the folder for the file.
            chunk_bytes: bytes of each thread's staging buffer.
            threads: threads for each direction.
            keep: give the file a name, so that it stays.
            direct: use direct I/O where the file system has it.
            lanes: side streams for tensors of a device; None for tensors in RAM.
        """
        if chunk_bytes <= 0 or chunk_bytes % PAGE:
            raise StowageError(f"chunk_bytes is {chunk_bytes}: it must be a positive multiple of {PAGE}.")
        self.folder = str(folder)
        self._chunk = chunk_bytes
        self._staging = 2 * threads * chunk_bytes
        try:
            os.makedirs(self.folder, exist_ok=True)
            if direct:
                self._handle, self.path, self.memory_alignment, self._offset_alignment = open_best(self.folder, keep)
            else:
                self._handle, self.path = open_file(self.folder, False, keep)
                self.memory_alignment = self._offset_alignment = 0
        except OSError as error:
            raise StowageError(
                f"No file can be made in the offload folder '{self.folder}': {error.strerror}; choose another folder."
            ) from error
        self.direct = self.memory_alignment > 0
        self.note = (
            ""
            if self.direct
            else f"The file system of '{self.folder}' is used through the page cache: it has no direct I/O, so that "
            "memory outside the budget is used for a moment, and for good if it is a file system in RAM."
        )
        self._end = 0
        self._slots = Slots()
        self._place: dict[str, int] = {}
        self._sizes: dict[str, int] = {}
        self._gaps: list[tuple[int, int]] = []
        """Start and bytes of room that was released, in order; no two touch."""
        self._last: dict[str, list[LaneJob]] = {}
        """For each slot its last offload, then the reloads since that are not complete."""
        self._issue = threading.Lock()
        # The threads' functions do not refer to the tier, or it would never be collected.
        self._device = lanes
        move = Mover(self._handle, chunk_bytes, self.memory_alignment, self._offset_alignment, lanes)
        staging = _pinned_staging(lanes, 2 * threads, chunk_bytes) if lanes is not None else None
        self._lanes = Lanes((OFFLOAD, RELOAD), threads, chunk_bytes, move, partial(_explain, self.folder), staging)
        self._close = weakref.finalize(self, _close, self._lanes, self._handle)

    @property
    def staging_bytes(self) -> int:
        """Implement `Tier.staging_bytes`: a buffer for each thread; none of them is in another device's memory."""
        return self._staging if self._device is None else 0

    @property
    def host_bytes(self) -> int:
        """Return the RAM that the tier takes when tensors are on another device: the same buffers."""
        return self._staging - self.staging_bytes

    @property
    def record(self) -> bool:
        """Implement `Tier.record`."""
        return self._lanes.record

    @record.setter
    def record(self, value: bool) -> None:
        self._lanes.record = value

    @property
    def spans(self) -> list[Span]:
        """Implement `Tier.spans`."""
        return self._lanes.spans

    @property
    def file_bytes(self) -> int:
        """Return the size of the file."""
        return self._end

    def reserve(self, slots: Mapping[str, int], on_disk: Collection[str] = ()) -> None:
        """Implement `Tier.reserve`; space is allocated now, so that a full disk is found before the first step."""
        del on_disk  # every slot is on the disk
        new = self._slots.new(slots)
        places, end, gaps = dict[str, int](), self._end, list(self._gaps)
        for name, nbytes in new.items():
            size = -(-nbytes // PAGE) * PAGE
            gap = min((g for g in gaps if g[1] >= size), key=lambda g: g[1], default=None)
            if gap is None:
                if gaps and sum(gaps[-1]) == end:  # the file grows by the bytes that are missing
                    end = gaps.pop()[0]
                places[name] = end
                end += size
                continue
            places[name] = gap[0]
            gaps.remove(gap)
            if gap[1] > size:
                gaps = sorted([*gaps, (gap[0] + size, gap[1] - size)])
        if end > self._end:
            self._allocate(end)
        self._gaps = gaps
        self._place.update(places)
        self._sizes.update({name: -(-nbytes // PAGE) * PAGE for name, nbytes in new.items()})
        self._slots.add(new)

    def release(self, names: Collection[str]) -> None:
        """Implement `Tier.release`; the file keeps its size, and new slots fill the gaps."""
        with self._issue:
            for name in names:
                for job in self._last.pop(name, []):
                    job.wait()
                start = self._place.pop(name, None)
                if start is not None:
                    self._gaps.append((start, self._sizes.pop(name)))
            self._gaps = _joined(self._gaps)
            self._slots.drop(names)

    def _allocate(self, end: int) -> None:
        need = end - self._end
        try:
            os.posix_fallocate(self._handle, self._end, need)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._handle, self._end)
            why, missing = error.strerror, need
            if error.errno == errno.ENOSPC:
                status = os.fstatvfs(self._handle)
                free = (status.f_bavail if os.geteuid() else status.f_bfree) * status.f_frsize
                missing = max(need - free, PAGE)
                why = f"only {size_text(free)} are free"
            raise StowageError(
                f"The offload folder '{self.folder}' has no room for {size_text(need)} ({need} bytes) more: {why}, so "
                f"at least {missing} bytes are missing; free them or choose another folder."
            ) from error
        self._end = end

    def offload(self, name: str, tensor: torch.Tensor) -> Transfer:
        """Implement `Tier.offload`."""
        return self._start(OFFLOAD, name, tensor, self._device)

    def reload(self, name: str, tensor: torch.Tensor) -> Transfer:
        """Implement `Tier.reload`."""
        return self._start(RELOAD, name, tensor, self._device)

    def content(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """Implement `HostMemory.content` with a copy in RAM."""
        memory = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="cpu")
        self._start(RELOAD, name, memory, None).wait()
        return memory

    def keep(self, name: str, tensor: torch.Tensor) -> None:
        """Implement `HostMemory.keep`; the content is written when it returns."""
        self._start(OFFLOAD, name, tensor, None).wait()

    def _start(self, stream: Stream, name: str, tensor: torch.Tensor, device: DeviceLanes | None) -> LaneJob:
        check_movable(name, tensor, ("cpu" if device is None else device.kind,))
        with self._issue:
            (self._slots.write if stream == OFFLOAD else self._slots.read)(name, tensor)
            moved = tensor.detach()
            if not is_dense(tensor):
                moved = (
                    packed(tensor)
                    if stream == OFFLOAD
                    else torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
                )
            chunks = max(1, -(-moved.numel() * moved.element_size() // self._chunk))
            job = LaneJob(stream, name, moved, self._place[name], chunks)
            if device is not None:
                job.ready = device.record(device.compute())
            if stream == RELOAD and moved.data_ptr() != tensor.data_ptr():
                job.unpack = partial(_unpack, tensor.detach(), moved, device)
            before = self._last.get(name, [])
            if stream == OFFLOAD:
                job.after = before
                self._last[name] = [job]
            else:
                writer = before[0]
                job.after = [writer]
                self._last[name] = [writer, *(other for other in before[1:] if not other.done()), job]
            self._lanes.submit(job)
        return job

    def written(self, name: str) -> bool:
        """Implement `Tier.written`."""
        return self._slots.written(name) and self._last[name][0].error is None

    def close(self) -> None:
        """Implement `Tier.close`; with `keep` the file stays, and is the caller's."""
        self._close()
        if self._device is not None:
            self._device.give_back()


def _joined(gaps: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return gaps in order, with those that touch joined."""
    found: list[tuple[int, int]] = []
    for start, size in sorted(gaps):
        if found and sum(found[-1]) == start:
            start, size = found[-1][0], found.pop()[1] + size
        found.append((start, size))
    return found


def _pinned_staging(lanes: DeviceLanes, count: int, nbytes: int) -> list[Staging]:
    """Make page-aligned buffers in one allocation: pinned memory is allocated in powers of two."""
    memory = lanes.pinned(count * nbytes)
    if memory.data_ptr() % PAGE:
        memory = lanes.pinned(count * nbytes + PAGE)
        memory = memory[-memory.data_ptr() % PAGE :]
    return [Staging.of(memory[i * nbytes : (i + 1) * nbytes]) for i in range(count)]


def _unpack(target: torch.Tensor, content: torch.Tensor, device: DeviceLanes | None) -> None:
    """Copy contiguous content into the tensor where it belongs."""
    if device is None:
        target.copy_(content)
        return
    side = device.side(RELOAD)
    device.copy(side, target, content)
    device.finish(device.record(side))


def _close(lanes: Lanes, handle: int) -> None:
    """End the threads and close the file, which vanishes if it has no name."""
    if lanes.is_mine():  # The garbage collector ran in one of the tier's threads, which cannot wait for itself.
        threading.Thread(target=_close, args=(lanes, handle), daemon=True).start()
        return
    lanes.stop()
    os.close(handle)


def _explain(folder: str, job: LaneJob, error: Exception) -> Exception:
    verb = "written to" if job.stream == OFFLOAD else "read from"
    why = error.strerror if isinstance(error, OSError) and error.strerror else f"{type(error).__name__}: {error}"
    return StowageError(
        f"'{job.name}' ({job.nbytes} bytes) could not be {verb} the offload file in '{folder}': {why}; check the disk "
        "and its free space, or choose another folder."
    )
