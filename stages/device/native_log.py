"""Silences the log of PyTorch's C++ part, which reaches the terminal without passing through Python."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from pathlib import Path

import torch

_ERRORS = 2
"""Level of the log at which only errors are shown: 0 shows everything, 1 warnings too."""


@contextlib.contextmanager
def without_native_warnings() -> Iterator[None]:
    """Log errors alone inside; without effect where torch's library does not have the level."""
    level = _level()
    if level is None:
        yield
        return
    before = level.value
    level.value = max(before, _ERRORS)
    try:
        yield
    finally:
        level.value = before


def _level() -> ctypes.c_int | None:
    found = sorted((Path(torch.__file__).parent / "lib").glob("libc10.*"))
    with contextlib.suppress(OSError, ValueError, IndexError):
        return ctypes.c_int.in_dll(ctypes.CDLL(str(found[0])), "FLAGS_caffe2_log_level")
    return None
