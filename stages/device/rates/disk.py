"""Measures rates of a disk, past the page cache where the file system allows it."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from stowage.stages.device.rates.at_once import ALONE, Stopwatch
from stowage.stages.ir.files import writing

CHUNK = 8 << 20
TOTAL = 128 << 20


@dataclass(frozen=True)
class DiskRates:
    """Rates of a disk, in bytes per second."""

    read_bytes_per_s: float
    write_bytes_per_s: float
    duplex_bytes_per_s: float


def _open(path: str, flags: int) -> int:
    with contextlib.suppress(OSError):
        return os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o600)
    return os.open(path, flags, 0o600)


def _write(path: str, buffer: mmap.mmap) -> None:
    handle = _open(path, os.O_WRONLY | os.O_CREAT)
    try:
        for _ in range(TOTAL // CHUNK):
            if os.write(handle, buffer) < CHUNK:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(handle)
    finally:
        os.close(handle)


def _read(path: str, buffer: mmap.mmap) -> None:
    handle = _open(path, os.O_RDONLY)
    try:
        while os.readv(handle, [buffer]):
            pass
    finally:
        os.close(handle)


def _rate(stopwatch: Stopwatch, *work: Callable[[], None]) -> float:
    def at_once() -> None:
        with ThreadPoolExecutor(len(work)) as threads:
            for done in [threads.submit(each) for each in work]:
                done.result()

    return len(work) * TOTAL / stopwatch.seconds(at_once)


def measure_disk(folder: str, stopwatch: Stopwatch = ALONE) -> DiskRates:
    """Write and read a temporary file in `folder`, one at a time and then both at once; return medians of three.

    Args:
        folder: where; each of several ranks writes a file of its own.
        stopwatch: times it: of this process, or of all ranks at once.

    Raises:
        UnwritableError: the file cannot be made there, or there is no room for it.
    """
    with room_in(folder):
        return _measured(folder, stopwatch)


def room_in(folder: str) -> AbstractContextManager[None]:
    """Say inside what a folder lacks that cannot be measured in."""
    return writing(Path(folder), 2 * TOTAL)


def _measured(folder: str, stopwatch: Stopwatch) -> DiskRates:
    os.makedirs(folder, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch, mmap.mmap(-1, CHUNK) as one, mmap.mmap(-1, CHUNK) as two:
        a, b = os.path.join(scratch, "a"), os.path.join(scratch, "b")
        one.write(os.urandom(CHUNK))

        def writer(path: str) -> Callable[[], None]:
            return lambda: _write(path, one)

        def reader(path: str) -> Callable[[], None]:
            return lambda: _read(path, two)

        write = sorted(_rate(stopwatch, writer(a)) for _ in range(3))[1]
        read = sorted(_rate(stopwatch, reader(a)) for _ in range(3))[1]
        duplex = sorted(_rate(stopwatch, writer(b), reader(a)) for _ in range(3))[1]
    return DiskRates(read, write, duplex)
