"""Bounds the memory that glibc's heap keeps after it was freed, in one of two ways.

A process can occupy up to a multiple of what it has allocated, so it can exceed a budget that its tensors keep.

`malloc` serves requests above a threshold from the system itself, and returns them when they are freed; others live in
the heap, which shrinks only from its end. With a fixed threshold (glibc would raise it, up to 32 MiB, to what is
freed) everything larger goes back at once. That is exact, and slow: the kernel zeroes fresh pages each time.

Or the heap keeps what is freed, and gives it back when the process occupies more than it may (`ResidentLimit`).
"""

from __future__ import annotations

import ctypes
import mmap
import time

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3

THRESHOLD = 1 << 20
"""Bytes from which on a block is returned to the system when it is freed.

Such a block gets fresh, zeroed pages each time it is allocated: a smaller threshold keeps memory closer to what is
allocated, and takes more time.
"""

LARGEST = 32 << 20
"""Bytes of the largest block that glibc serves from its heap."""

NEVER = -1
"""Value of M_TRIM_THRESHOLD with which the heap is not trimmed by itself."""


def _glibc() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(None)
        return library if hasattr(library, "gnu_get_libc_version") and hasattr(library, "mallopt") else None
    except OSError:
        return None


def return_freed_memory(threshold_bytes: int = THRESHOLD) -> bool:
    """Return blocks of `threshold_bytes` and more to the system when they are freed, for the rest of this process.

    The heap of smaller ones shrinks when as much is free at its end. Blocks that are in the heap already stay there, so
    call it before large tensors are made.

    Returns:
        False where the allocator is not glibc's, and nothing was done.
    """
    library = _glibc()
    if library is None:
        return False
    return _set(library, (M_MMAP_THRESHOLD, threshold_bytes), (M_TRIM_THRESHOLD, threshold_bytes))


def keep_freed_memory() -> bool:
    """Keep freed blocks of up to `LARGEST` bytes in the heap, for the rest of this process.

    So the kernel need not zero their pages in every iteration, as it does when the end of the heap is released and
    taken again. The heap grows no further than without; it gives nothing back between iterations. What is free at the
    call is returned to the system.

    Returns:
        False where the allocator is not glibc's, and nothing was done.
    """
    library = _glibc()
    if library is None:
        return False
    trim()
    return _set(library, (M_MMAP_THRESHOLD, LARGEST), (M_TRIM_THRESHOLD, NEVER))


def _set(library: ctypes.CDLL, *values: tuple[int, int]) -> bool:
    library.mallopt.argtypes, library.mallopt.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_int
    return all(library.mallopt(name, value) == 1 for name, value in values)


def trim() -> bool:
    """Give back every free page inside the heap now; return whether there were any."""
    library = _glibc()
    return library is not None and bool(library.malloc_trim(0))


PAUSE = 20.0
"""Pause between two tries, in times of what one try takes."""


class ResidentLimit:
    """Keeps what the process occupies under a limit, by giving freed memory back only when the limit is passed.

    It is for a heap that keeps freed memory, which is fast; `check` is called often (it reads one small file of the
    kernel, microseconds). Between two checks the process can grow by what it allocates in between.

    Attributes:
        limit_bytes: limit of resident memory, which includes libraries and threads.
        trims: how often memory was given back.
    """

    def __init__(self, limit_bytes: int, slack_bytes: int = 16 << 20) -> None:
        """Set the limit.

        Args:
            limit_bytes: the most that the process may occupy.
            slack_bytes: above the limit, try again at once after growing by so much, else when a try costs little of
                the time since the last one (which may have found everything in use).
        """
        self.limit_bytes = limit_bytes
        self.trims = 0
        self._slack = slack_bytes
        self._after = 0
        self._again_s = 0.0

    def check(self) -> int:
        """Give freed memory back if the limit is passed; return the bytes that are resident now."""
        now = resident_bytes()
        began = time.perf_counter()
        if now > self.limit_bytes and (now > self._after + self._slack or began > self._again_s):
            trim()
            self.trims += 1
            now = self._after = resident_bytes()
            ended = time.perf_counter()
            self._again_s = ended + PAUSE * (ended - began)
        self._after = min(self._after, now)
        return now


RETAINED_BYTES = 96 << 20
"""Freed memory that the heap may keep besides: with less, a step that offloads spends more time on fresh pages."""


def limit_for(budget_bytes: int, retained_bytes: int) -> ResidentLimit | None:
    """Return a limit: what the process occupies besides tensors, the tensors' budget, and `RETAINED_BYTES`.

    Args:
        budget_bytes: the budget of tensors.
        retained_bytes: the bytes of tensors that are in memory now.

    Returns:
        The limit; None where the allocator is not glibc's.
    """
    if _glibc() is None:
        return None
    return ResidentLimit(max(0, resident_bytes() - retained_bytes) + budget_bytes + RETAINED_BYTES)


def resident_bytes() -> int:
    """Return the bytes that this process occupies in memory."""
    with open("/proc/self/statm", "rb", buffering=0) as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE


def available_bytes() -> int:
    """Return the bytes that this machine can give to processes without swapping."""
    with open("/proc/meminfo", encoding="ascii") as file:
        found = {name: int(value.split()[0]) for name, value in (line.split(":") for line in file)}
    return found["MemAvailable"] << 10
