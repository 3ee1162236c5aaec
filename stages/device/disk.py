"""Rates of the disk tier, measured past the page cache where the file system allows it."""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import threading
import time
from dataclasses import dataclass

CHUNK = 8 << 20
TOTAL = 128 << 20


@dataclass(frozen=True)
class DiskRates:
    """Bytes per second."""

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
            os.write(handle, buffer)
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


def _rate(*work: threading.Thread) -> float:
    start = time.perf_counter()
    for thread in work:
        thread.start()
    for thread in work:
        thread.join()
    return len(work) * TOTAL / (time.perf_counter() - start)


def measure_disk(folder: str) -> DiskRates:
    """Write and read a temporary file in `folder`, one at a time and then both at once; medians of three."""
    os.makedirs(folder, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch, mmap.mmap(-1, CHUNK) as one, mmap.mmap(-1, CHUNK) as two:
        a, b = os.path.join(scratch, "a"), os.path.join(scratch, "b")
        one.write(os.urandom(CHUNK))

        def writer(path: str) -> threading.Thread:
            return threading.Thread(target=_write, args=(path, one))

        def reader(path: str) -> threading.Thread:
            return threading.Thread(target=_read, args=(path, two))

        write = sorted(_rate(writer(a)) for _ in range(3))[1]
        read = sorted(_rate(reader(a)) for _ in range(3))[1]
        duplex = sorted(_rate(writer(b), reader(a)) for _ in range(3))[1]
    return DiskRates(read, write, duplex)
