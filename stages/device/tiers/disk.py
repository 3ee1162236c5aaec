"""Disk as the tier below RAM: one preallocated file, read and written past the page cache.

The page cache would be memory outside the budget, and a cgroup counts it: so direct I/O, through page-aligned staging
buffers that the budget counts. Copies between staging and tensors and the I/O itself run in threads, outside the GIL.
Tensors that are aligned as the file system asks (`memory_alignment`) need no staging copy.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import tempfile
import threading
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from stowage.stages.device.tiers.base import OFFLOAD, RELOAD, Span, Stream, Transfer
from stowage.stages.device.tiers.lanes import Job, Lanes, Staging
from stowage.stages.device.tiers.layout import check_movable, is_dense, packed
from stowage.stages.device.tiers.slots import Slots
from stowage.stages.ir.errors import StowageError, mib
from stowage.stages.ir.machine import DISK_CHUNK_BYTES, DISK_THREADS

PAGE = 4096

_AT_EMPTY_PATH, _STATX_DIOALIGN = 0x1000, 0x2000
_MEM_ALIGN, _OFFSET_ALIGN = slice(152, 156), slice(156, 160)


def direct_alignment(handle: int) -> tuple[int, int]:
    """Alignment of memory and of offsets that direct I/O on an open file needs; (0, 0) where there is none.

    A file system that takes the flag may still go through the page cache, so it is asked. One that does not answer gets
    what satisfies all of them, unless it is in RAM.
    """
    if _in_ram(handle):
        return 0, 0
    statx = getattr(ctypes.CDLL(None, use_errno=True), "statx", None)
    answer = bytearray(256)
    if statx is not None:
        target = (ctypes.c_char * len(answer)).from_buffer(answer)
        if statx(handle, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, target) != 0:
            return PAGE, PAGE
    if statx is None or not int.from_bytes(answer[:4], "little") & _STATX_DIOALIGN:
        return PAGE, PAGE
    return int.from_bytes(answer[_MEM_ALIGN], "little"), int.from_bytes(answer[_OFFSET_ALIGN], "little")


def _in_ram(handle: int) -> bool:
    """Whether an open file is on a file system that is itself memory."""
    device = os.fstat(handle).st_dev
    with contextlib.suppress(OSError), open("/proc/self/mountinfo", encoding="utf-8") as mounts:
        for line in mounts:
            left, _, right = line.partition(" - ")
            if left.split()[2] == f"{os.major(device)}:{os.minor(device)}":
                return right.split()[0] in ("tmpfs", "ramfs")
    return False


def _open(folder: str, direct: bool, keep: bool) -> tuple[int, Path | None]:
    """A new file without a name: it vanishes with its last open handle, also when the process is killed."""
    flags = os.O_RDWR | os.O_CLOEXEC | (getattr(os, "O_DIRECT", 0) if direct else 0)
    if not keep and hasattr(os, "O_TMPFILE"):
        with contextlib.suppress(OSError):
            return os.open(folder, flags | os.O_TMPFILE, 0o600), None
    named, path = tempfile.mkstemp(prefix="offload-", suffix=".bin", dir=folder)
    os.close(named)
    try:
        handle = os.open(path, flags)
    except OSError:
        os.unlink(path)
        raise
    if not keep:
        os.unlink(path)
    return handle, Path(path) if keep else None


def _open_best(folder: str, keep: bool) -> tuple[int, Path | None, int, int]:
    """(handle, path, memory alignment, offset alignment); alignments are 0 through the page cache."""
    if hasattr(os, "O_DIRECT"):
        with contextlib.suppress(OSError):
            handle, path = _open(folder, True, keep)
            memory, offset = direct_alignment(handle)
            if memory and PAGE % offset == 0 and PAGE % memory == 0:
                return handle, path, memory, offset
            os.close(handle)
            if path is not None:
                path.unlink()
    return *_open(folder, False, keep), 0, 0


class DiskTier:
    """See `Tier`. Tensors are in RAM.

    Attributes:
        folder: that the file is in.
        path: of the file; None unless `keep`: without a name nothing can be left behind.
        memory_alignment: of tensors that go to the disk without a copy; 0 where there is no direct I/O.
        direct: whether the page cache is bypassed.
        note: one sentence where it is not, else empty.
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
    ) -> None:
        """`threads` for each direction, each with a staging buffer of `chunk_bytes`; `direct=False`: no direct I/O."""
        if chunk_bytes <= 0 or chunk_bytes % PAGE:
            raise StowageError(f"chunk_bytes is {chunk_bytes}: it must be a positive multiple of {PAGE}.")
        self.folder = str(folder)
        self._chunk = chunk_bytes
        self._staging = 2 * threads * chunk_bytes
        try:
            os.makedirs(self.folder, exist_ok=True)
            if direct:
                self._handle, self.path, self.memory_alignment, self._offset_alignment = _open_best(self.folder, keep)
            else:
                self._handle, self.path = _open(self.folder, False, keep)
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
        self._last: dict[str, list[Job]] = {}
        """Of each slot: its last offload, then the reloads since that are not complete."""
        self._issue = threading.Lock()
        # What the threads call holds no reference to the tier, or it would never be collected.
        move = _Mover(self._handle, chunk_bytes, self.memory_alignment, self._offset_alignment)
        self._lanes = Lanes((OFFLOAD, RELOAD), threads, chunk_bytes, move, partial(_explain, self.folder))
        self._close = weakref.finalize(self, _close, self._lanes, self._handle)

    @property
    def staging_bytes(self) -> int:
        """See `Tier`: a buffer for each thread."""
        return self._staging

    @property
    def record(self) -> bool:
        """See `Tier`."""
        return self._lanes.record

    @record.setter
    def record(self, value: bool) -> None:
        self._lanes.record = value

    @property
    def spans(self) -> list[Span]:
        """See `Tier`."""
        return self._lanes.spans

    @property
    def file_bytes(self) -> int:
        """Size of the file."""
        return self._end

    def reserve(self, slots: Mapping[str, int]) -> None:
        """See `Tier`. Space is allocated now: a disk that is full says so before the first step."""
        new = self._slots.new(slots)
        places, end = {}, self._end
        for name, nbytes in new.items():
            places[name] = end
            end += -(-nbytes // PAGE) * PAGE
        if end > self._end:
            self._allocate(end)
        self._place.update(places)
        self._slots.add(new)

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
                why = f"only {mib(free)} are free"
            raise StowageError(
                f"The offload folder '{self.folder}' has no room for {mib(need)} ({need} bytes) more: {why}, so at "
                f"least {missing} bytes are missing; free them or choose another folder."
            ) from error
        self._end = end

    def offload(self, name: str, tensor: torch.Tensor) -> Transfer:
        """See `Tier`."""
        check_movable(name, tensor, ("cpu",))
        with self._issue:
            self._slots.write(name, tensor)
            job = self._job(OFFLOAD, name, tensor.detach() if is_dense(tensor) else packed(tensor))
            job.after = self._last.get(name, [])
            self._last[name] = [job]
            self._lanes.submit(job)
        return job

    def reload(self, name: str, tensor: torch.Tensor) -> Transfer:
        """See `Tier`."""
        check_movable(name, tensor, ("cpu",))
        with self._issue:
            self._slots.read(name, tensor)
            target = tensor.detach()
            if is_dense(tensor):
                job = self._job(RELOAD, name, target)
            else:
                contiguous = torch.empty(tensor.shape, dtype=tensor.dtype)
                job = self._job(RELOAD, name, contiguous)
                job.unpack = partial(target.copy_, contiguous)
            before = self._last[name]
            writer = before[0]
            job.after = [writer]
            self._last[name] = [writer, *(other for other in before[1:] if not other.done()), job]
            self._lanes.submit(job)
        return job

    def written(self, name: str) -> bool:
        """See `Tier`."""
        return self._slots.written(name) and self._last[name][0].error is None

    def close(self) -> None:
        """See `Tier`. With `keep` the file stays, and is the caller's."""
        self._close()

    def _job(self, stream: Stream, name: str, tensor: torch.Tensor) -> Job:
        chunks = max(1, -(-tensor.numel() * tensor.element_size() // self._chunk))
        return Job(stream, name, tensor, self._place[name], chunks)


def _close(lanes: Lanes, handle: int) -> None:
    """End the threads and close the file, which vanishes."""
    if lanes.is_mine():  # the tier was garbage that this thread happened to collect: it cannot wait for itself
        threading.Thread(target=_close, args=(lanes, handle), daemon=True).start()
        return
    lanes.stop()
    os.close(handle)


def _explain(folder: str, job: Job, error: Exception) -> Exception:
    verb = "written to" if job.stream == OFFLOAD else "read from"
    why = error.strerror if isinstance(error, OSError) and error.strerror else f"{type(error).__name__}: {error}"
    return StowageError(
        f"'{job.name}' ({job.nbytes} bytes) could not be {verb} the offload file in '{folder}': {why}; check the disk "
        "and its free space, or choose another folder."
    )


class _Mover:
    """Moves chunks between a file and memory."""

    def __init__(self, handle: int, chunk: int, memory_alignment: int, offset_alignment: int) -> None:
        self._handle, self._chunk = handle, chunk
        self._memory, self._offset = memory_alignment, offset_alignment

    def __call__(self, job: Job, chunk: int, staging: Staging) -> None:
        """One chunk: what may go straight between tensor and file does, the rest through `staging`."""
        start = chunk * self._chunk
        length = min(self._chunk, job.nbytes - start)
        address, position = job.address + start, job.slot + start
        if length <= 0:
            return
        move = self._write if job.stream == OFFLOAD else self._read
        if not self._memory:
            move(_memory(address, length), position)
            self._forget(job.stream, position, length)
            return
        straight = length // PAGE * PAGE if address % self._memory == 0 else 0
        if straight:
            move(_memory(address, straight), position)
        rest = length - straight
        if rest == 0:
            return
        padded = staging.view[: -(-rest // PAGE) * PAGE]
        if job.stream == OFFLOAD:
            ctypes.memmove(staging.address, address + straight, rest)
            self._write(padded, position + straight)
        else:
            self._read(padded, position + straight)
            ctypes.memmove(address + straight, staging.address, rest)

    def _write(self, buffer: memoryview, position: int) -> None:
        self._all(os.pwritev, buffer, position, "nothing more was written")

    def _read(self, buffer: memoryview, position: int) -> None:
        self._all(os.preadv, buffer, position, "the file ended early")

    def _all(self, call: Callable[[int, Any, int], int], buffer: memoryview, position: int, stuck: str) -> None:
        """Repeat a call that may do less than asked for (interrupted calls are repeated by Python)."""
        done = 0
        while done < len(buffer):
            more = call(self._handle, [buffer[done:]], position + done)
            if self._offset and done + more < len(buffer):
                more -= (done + more) % max(self._offset, self._memory)  # the next call must be aligned again
            if more <= 0:
                raise OSError(errno.EIO, stuck)
            done += more

    def _forget(self, stream: Stream, position: int, length: int) -> None:
        """Without direct I/O: leave nothing in the page cache, which only holds on to what is not on disk yet."""
        if stream == OFFLOAD:
            os.fdatasync(self._handle)
        begin, end = position // PAGE * PAGE, -(-(position + length) // PAGE) * PAGE
        os.posix_fadvise(self._handle, begin, end - begin, os.POSIX_FADV_DONTNEED)


def _memory(address: int, length: int) -> memoryview:
    """Memory of a tensor as a buffer; the job holds the tensor."""
    return memoryview((ctypes.c_char * length).from_address(address)).cast("B")
