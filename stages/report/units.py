"""Writes bytes, times and ratios as text for people."""

from __future__ import annotations

import math
from collections.abc import Iterable

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
NOTHING = "–"


def size(nbytes: float | None) -> str:
    """Write bytes with the unit that keeps the number short: `984.3 MiB`."""
    if nbytes is None:
        return NOTHING
    unit, name = byte_unit((nbytes,))
    return f"{nbytes / unit:,.2f} {name}" if unit == GIB else f"{nbytes / unit:,.1f} {name}"


def byte_unit(values: Iterable[float]) -> tuple[int, str]:
    """Choose one unit for a whole axis: return its bytes and its name."""
    largest = max((abs(v) for v in values), default=0)
    if largest >= 10 * GIB:
        return GIB, "GiB"
    return (MIB, "MiB") if largest >= MIB / 2 or largest == 0 else (KIB, "KiB")


def seconds(value: float | None) -> str:
    """Write seconds with the unit that keeps the number short: `12.4 ms`."""
    if value is None or math.isnan(value):
        return NOTHING
    for factor, name in ((1.0, "s"), (1e-3, "ms")):
        if abs(value) >= factor:
            return f"{value / factor:,.3g} {name}" if abs(value / factor) < 100 else f"{value / factor:,.0f} {name}"
    return f"{value * 1e6:,.3g} µs"


def percent(value: float | None) -> str:
    """Write a fraction as a percentage with one decimal."""
    return NOTHING if value is None or not math.isfinite(value) else f"{100 * value:.1f}%"


def ratio(mine: float | None, other: float | None) -> float | None:
    """Return mine / other, None where either is missing."""
    if mine is None or not other or math.isnan(mine) or math.isnan(other):
        return None
    return mine / other


def times(value: float | None) -> str:
    """Write a ratio as `0.62 ×`."""
    return NOTHING if value is None else f"{value:.2f} ×"


def number(value: float) -> str:
    """Write a loss with every digit that float32 has."""
    return NOTHING if math.isnan(value) else f"{value:.9g}"


def ranges(numbers: Iterable[int]) -> str:
    """Write integers as ranges: `0–3, 7`."""
    runs: list[list[int]] = []
    for n in sorted(set(numbers)):
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in runs)
