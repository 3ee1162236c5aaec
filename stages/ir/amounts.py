"""Bytes and seconds for people, in units that show the number."""

from __future__ import annotations


def size_text(nbytes: int) -> str:
    """Format bytes for people: `3.69 MiB`."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:,.2f} {name}"
    return f"{nbytes} B"


def time_text(seconds: float) -> str:
    """Format seconds for people: `1.77 s`."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.2f} ms"
