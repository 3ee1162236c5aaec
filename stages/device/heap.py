"""glibc's heap holds memory that was freed: make it give large blocks back at once.

`malloc` serves requests above a threshold from the system itself, and returns them when they are freed. But each such
free *raises* the threshold to the size freed, up to 32 MiB; from then on blocks up to that size live in the heap,
which shrinks only from its end. What a process occupies is then up to a multiple of what it has allocated, and a budget
that is kept to the byte is still exceeded. Setting the threshold switches the rise off.
"""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3

THRESHOLD = 1 << 20
"""Bytes. Every block from here on costs a system call and fresh, zeroed pages each time it is allocated."""


def _glibc() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(None)
        return library if hasattr(library, "gnu_get_libc_version") and hasattr(library, "mallopt") else None
    except OSError:
        return None


def return_freed_memory(threshold_bytes: int = THRESHOLD) -> bool:
    """Blocks of `threshold_bytes` and more go back to the system when they are freed, for the rest of this process.

    The heap of smaller ones shrinks when as much is free at its end. Blocks in the heap already stay there, so call it
    before large tensors are made. False where the allocator is not glibc's, and nothing was done.
    """
    library = _glibc()
    if library is None:
        return False
    library.mallopt.argtypes, library.mallopt.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_int
    values = ((M_MMAP_THRESHOLD, threshold_bytes), (M_TRIM_THRESHOLD, threshold_bytes))
    return all(library.mallopt(name, value) == 1 for name, value in values)


def trim() -> bool:
    """Give back every free page inside the heap now, for memory that was freed before the threshold was set."""
    library = _glibc()
    return library is not None and bool(library.malloc_trim(0))
