"""Runs transfers in worker threads: a lane for each stream, whose threads share the chunks of its transfers."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from stowage.stages.device.tiers.base import OFFLOAD, Span, Stream
from stowage.stages.ir.errors import StowageError


class Staging:
    """A page-aligned buffer of one thread.

    Attributes:
        view, address: its memory.
        tensor: the same memory as flat bytes, where a device reaches it.
    """

    def __init__(self, view: memoryview, tensor: torch.Tensor | None = None) -> None:
        self.view = view
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(view))
        self.tensor = tensor

    @staticmethod
    def new(nbytes: int) -> Staging:
        """Make a buffer in private memory.

        Otherwise it would count as shared memory. Forks do not inherit it, or they would copy pages that are in use.
        """
        pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_DONTFORK"):
            pages.madvise(mmap.MADV_DONTFORK)
        return Staging(memoryview(pages))

    @staticmethod
    def of(tensor: torch.Tensor) -> Staging:
        """Make a buffer of the memory of a flat tensor of bytes in RAM."""
        memory = (ctypes.c_char * tensor.numel()).from_address(tensor.data_ptr())
        return Staging(memoryview(memory).cast("B"), tensor)


class LaneJob:
    """One transfer: the `Transfer` that callers have, and what the threads need to know of it."""

    def __init__(self, stream: Stream, name: str, tensor: torch.Tensor, slot: int, chunks: int) -> None:
        self.stream: Stream = stream
        self.name = name
        self.nbytes = tensor.numel() * tensor.element_size()
        self.address = tensor.data_ptr()
        self.slot = slot
        self.chunks = chunks
        self.tensor: torch.Tensor | None = tensor
        """Referred to until the transfer is complete, so that its memory is not given to others."""
        self.ready: Any = None
        """For a tensor on a device, the event after which its memory may be copied or written."""
        self.unpack: Callable[[], object] | None = None
        """Run after the last chunk of a reload."""
        self.after: list[LaneJob] = []
        """Jobs that must be complete before this one starts; those that it reads from must not have failed."""
        self.claimed = 0
        self.left = chunks
        self.moved = False
        self.waited_on = False
        self.error: Exception | None = None
        self.start_s = 0.0
        self._complete = threading.Event()

    def wait(self) -> None:
        """Implement `Transfer.wait`."""
        self._complete.wait()
        if self.error is not None:
            raise StowageError(str(self.error)) from self.error

    def done(self) -> bool:
        """Implement `Transfer.done`."""
        return self._complete.is_set()

    def finish(self) -> None:
        """Drop all references and wake those who wait."""
        self.tensor = self.unpack = None
        self.after = []
        self._complete.set()


class _Lane:
    def __init__(self, lock: threading.Lock) -> None:
        self.ready = threading.Condition(lock)
        self.unclaimed: deque[LaneJob] = deque()
        self.unfinished: deque[LaneJob] = deque()


class Lanes:
    """Runs jobs. Each stream starts and completes them in the order of `submit`, both streams at the same time.

    There can be no deadlock: a job waits only for jobs submitted before it.
    """

    def __init__(
        self,
        streams: tuple[Stream, ...],
        threads: int,
        staging_bytes: int,
        move: Callable[[LaneJob, int, Staging], None],
        failed: Callable[[LaneJob, Exception], Exception],
        stagings: Sequence[Staging] | None = None,
    ) -> None:
        """Start the threads.

        Args:
            streams: the streams, each with threads of its own.
            threads: threads for each stream.
            staging_bytes: bytes of each thread's buffer.
            move: transfers one chunk.
            failed: turns the error of a chunk into one that says which transfer failed.
            stagings: the threads' buffers; new ones by default.
        """
        self.record = False
        self.spans: list[Span] = []
        self._move, self._failed = move, failed
        self._lock = threading.Lock()
        self._lanes = {stream: _Lane(self._lock) for stream in streams}
        self._stopped = False
        self._process = os.getpid()
        made = stagings or [Staging.new(staging_bytes) for _ in range(threads * len(streams))]
        self._threads = [
            threading.Thread(target=self._run, args=(lane, staging), name=f"stowage-{stream}", daemon=True)
            for (stream, lane), staging in zip(
                [i for i in self._lanes.items() for _ in range(threads)], made, strict=True
            )
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: LaneJob) -> None:
        """Queue a job."""
        lane = self._lanes[job.stream]
        with self._lock:
            if self._stopped:
                raise StowageError(f"'{job.name}' cannot be moved: its tier was closed.")
            job.after = [other for other in job.after if not other.done() or other.error is not None]
            for other in job.after:
                other.waited_on = True
            lane.unclaimed.append(job)
            lane.unfinished.append(job)
            lane.ready.notify(job.chunks)

    def is_mine(self) -> bool:
        """Return whether the caller is one of the threads."""
        return threading.current_thread() in self._threads

    def stop(self) -> None:
        """Finish the chunks under way, fail the rest, and end the threads. Do not call it in one of the threads."""
        if os.getpid() != self._process:
            return  # a fork has no threads, and perhaps a lock that nobody will release
        with self._lock:
            self._stopped = True
            for lane in self._lanes.values():
                lane.ready.notify_all()
        for thread in self._threads:
            thread.join()
        with self._lock:
            for lane in self._lanes.values():
                for job in lane.unfinished:
                    job.error = job.error or StowageError(f"'{job.name}' was not moved: its tier was closed.")
                    job.finish()
                lane.unfinished.clear()
                lane.unclaimed.clear()

    def _run(self, lane: _Lane, staging: Staging) -> None:
        while True:
            with self._lock:
                claim = self._claim(lane)
                while claim is None:
                    if self._stopped:
                        return
                    lane.ready.wait()
                    claim = self._claim(lane)
            job, chunk = claim
            error: Exception | None = None
            if job.error is None:
                try:
                    self._move(job, chunk, staging)
                except Exception as problem:
                    error = problem
            del claim
            self._account(lane, job, error)
            del job

    def _claim(self, lane: _Lane) -> tuple[LaneJob, int] | None:
        """Return the next chunk of the lane's first transfer, if that may start. Call it with the lock taken."""
        if self._stopped or not lane.unclaimed:
            return None
        job = lane.unclaimed[0]
        if job.claimed == 0:
            if any(not other.done() for other in job.after):
                return None
            job.start_s = time.perf_counter()
            broken = [o for o in job.after if o.error is not None and o.stream == OFFLOAD != job.stream]
            if broken:
                job.error = broken[0].error
        job.claimed += 1
        if job.claimed == job.chunks:
            lane.unclaimed.popleft()
        return job, job.claimed - 1

    def _account(self, lane: _Lane, job: LaneJob, error: Exception | None) -> None:
        """Count a chunk; after a transfer's last one complete it, and those behind it that only waited for it."""
        with self._lock:
            if error is not None and job.error is None:
                job.error = self._failed(job, error)
            job.left -= 1
            last = job.left == 0
        if not last:
            return
        if job.error is None and job.unpack is not None:
            try:
                job.unpack()
            except Exception as problem:
                job.error = self._failed(job, problem)
        with self._lock:
            job.moved = True
            now = time.perf_counter()
            while lane.unfinished and lane.unfinished[0].moved:
                first = lane.unfinished.popleft()
                if self.record and first.error is None:
                    self.spans.append(Span(first.stream, first.name, first.nbytes, first.start_s, now))
                first.finish()
                if first.waited_on:
                    for other in self._lanes.values():
                        other.ready.notify_all()
