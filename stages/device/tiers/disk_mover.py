"""Transfers chunks between a file and memory: the host's, or a device's through pinned buffers."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable
from typing import Any

from stowage.stages.device.tiers.base import OFFLOAD, RELOAD, Stream
from stowage.stages.device.tiers.cuda_lanes import DeviceLanes
from stowage.stages.device.tiers.disk_file import PAGE
from stowage.stages.device.tiers.lanes import LaneJob, Staging
from stowage.stages.device.tiers.layout import flat_bytes


class Mover:
    """Transfers chunks between a file and memory, of the host or of a device."""

    def __init__(
        self, handle: int, chunk: int, memory_alignment: int, offset_alignment: int, lanes: DeviceLanes | None
    ) -> None:
        self._handle, self._chunk = handle, chunk
        self._memory, self._offset = memory_alignment, offset_alignment
        self._lanes = lanes

    def __call__(self, job: LaneJob, chunk: int, staging: Staging) -> None:
        """Transfer one chunk: straight between tensor and file where that is possible, the rest through `staging`."""
        start = chunk * self._chunk
        length = min(self._chunk, job.nbytes - start)
        if length <= 0:
            return
        if job.ready is not None:
            self._of_device(job, start, length, staging)
            return
        address, position = job.address + start, job.slot + start
        straight = length // PAGE * PAGE if self._memory and address % self._memory == 0 else 0
        if not self._memory:
            straight = length
        if straight:
            (self._write if job.stream == OFFLOAD else self._read)(_memory(address, straight), position)
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

    def _of_device(self, job: LaneJob, start: int, length: int, staging: Staging) -> None:
        """Transfer the whole chunk through `staging`, which the device reaches by itself."""
        lanes, tensor, memory = self._lanes, job.tensor, staging.tensor
        assert lanes is not None
        assert tensor is not None
        assert memory is not None
        side, position = lanes.side(job.stream), job.slot + start
        content = flat_bytes(tensor)[start : start + length]
        padded = staging.view[: -(-length // PAGE) * PAGE]
        if job.stream == RELOAD:
            self._read(padded, position)
        lanes.wait(side, job.ready)
        if job.stream == OFFLOAD:
            lanes.copy(side, memory[:length], content)
        else:
            lanes.copy(side, content, memory[:length])
        lanes.finish(lanes.record(side))
        if job.stream == OFFLOAD:
            self._write(padded, position)

    def _write(self, buffer: memoryview, position: int) -> None:
        self._all(os.pwritev, buffer, position, "nothing more was written")
        self._forget(OFFLOAD, position, len(buffer))

    def _read(self, buffer: memoryview, position: int) -> None:
        self._all(os.preadv, buffer, position, "the file ended early")
        self._forget(RELOAD, position, len(buffer))

    def _all(self, call: Callable[[int, Any, int], int], buffer: memoryview, position: int, stuck: str) -> None:
        """Repeat a call that may do less than asked for (interrupted calls are repeated by Python)."""
        done = 0
        while done < len(buffer):
            more = call(self._handle, [buffer[done:]], position + done)
            if self._offset and done + more < len(buffer):
                more -= (done + more) % max(self._offset, self._memory)  # or the next call would not be aligned
            if more <= 0:
                raise OSError(errno.EIO, stuck)
            done += more

    def _forget(self, stream: Stream, position: int, length: int) -> None:
        """Without direct I/O, leave nothing in the page cache, which keeps only what is not on the disk yet."""
        if self._memory:
            return
        if stream == OFFLOAD:
            os.fdatasync(self._handle)
        begin, end = position // PAGE * PAGE, -(-(position + length) // PAGE) * PAGE
        os.posix_fadvise(self._handle, begin, end - begin, os.POSIX_FADV_DONTNEED)


def _memory(address: int, length: int) -> memoryview:
    """Return memory of a tensor as a buffer; the job refers to the tensor."""
    return memoryview((ctypes.c_char * length).from_address(address)).cast("B")
