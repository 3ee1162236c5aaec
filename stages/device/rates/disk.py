"""Measures rates of a disk, past the page cache where the file system allows it."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

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


def _rate(*work: Callable[[], None]) -> float:
    start = time.perf_counter()
    with ThreadPoolExecutor(len(work)) as threads:
        for done in [threads.submit(each) for each in work]:
            done.result()
    return len(work) * TOTAL / (time.perf_counter() - start)


def measure_disk(folder: str) -> DiskRates:
    """Write and read a temporary file in `folder`, one at a time and then both at once; return medians of three.

    Raises:
        UnwritableError: the file cannot be made there, or there is no room for it.
    """
    with writing(Path(folder), 2 * TOTAL):
        return _measured(folder)


def _measured(folder: str) -> DiskRates:
    os.makedirs(folder, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch, mmap.mmap(-1, CHUNK) as one, mmap.mmap(-1, CHUNK) as two:
        a, b = os.path.join(scratch, "a"), os.path.join(scratch, "b")
        one.write(os.urandom(CHUNK))

        def writer(path: str) -> Callable[[], None]:
            return lambda: _write(path, one)

        def reader(path: str) -> Callable[[], None]:
            return lambda: _read(path, two)

        write = sorted(_rate(writer(a)) for _ in range(3))[1]
        read = sorted(_rate(reader(a)) for _ in range(3))[1]
        duplex = sorted(_rate(writer(b), reader(a)) for _ in range(3))[1]
    return DiskRates(read, write, duplex)
