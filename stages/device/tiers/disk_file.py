"""Opens the file of a disk tier: without a name, and past the page cache where the file system allows it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import tempfile
from pathlib import Path

PAGE = 4096

_AT_EMPTY_PATH, _STATX_DIOALIGN = 0x1000, 0x2000
_MEM_ALIGN, _OFFSET_ALIGN = slice(152, 156), slice(156, 160)


def direct_alignment(handle: int) -> tuple[int, int]:
    """Return the alignment of memory and of offsets that direct I/O on an open file needs; (0, 0) without direct I/O.

    A file system that takes the flag may still go through the page cache, so it is asked. For one that does not answer,
    return an alignment that satisfies all of them, unless it is in RAM.
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
    """Return whether an open file is on a file system that is itself memory."""
    device = os.fstat(handle).st_dev
    with contextlib.suppress(OSError), open("/proc/self/mountinfo", encoding="utf-8") as mounts:
        for line in mounts:
            left, _, right = line.partition(" - ")
            if left.split()[2] == f"{os.major(device)}:{os.minor(device)}":
                return right.split()[0] in ("tmpfs", "ramfs")
    return False


def open_file(folder: str, direct: bool, keep: bool) -> tuple[int, Path | None]:
    """Open a new file without a name: it vanishes with its last open handle, also when the process is killed."""
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


def open_best(folder: str, keep: bool) -> tuple[int, Path | None, int, int]:
    """Return (handle, path, memory alignment, offset alignment); alignments are 0 through the page cache."""
    if hasattr(os, "O_DIRECT"):
        with contextlib.suppress(OSError):
            handle, path = open_file(folder, True, keep)
            memory, offset = direct_alignment(handle)
            if memory and PAGE % offset == 0 and PAGE % memory == 0:
                return handle, path, memory, offset
            os.close(handle)
            if path is not None:
                path.unlink()
    return *open_file(folder, False, keep), 0, 0
