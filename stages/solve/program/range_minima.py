"""Finds minima over stretches of an array, each in constant time, with a sparse table.

After Bender and Farach-Colton, The LCA problem revisited (2000).
"""

from __future__ import annotations

import numpy as np

Array = np.ndarray[tuple[int], np.dtype[np.int64]]


class RangeMinima:
    """Answers for an array as it was when this was made."""

    def __init__(self, values: Array) -> None:
        self._levels = [values.copy()]
        width = 1
        while 2 * width <= len(values):
            last = self._levels[-1]
            self._levels.append(np.minimum(last[:-width], last[width:]))
            width *= 2

    def of(self, start: int, end: int) -> int:
        """Return the least of `values[start:end]`, which is not empty."""
        level = (end - start).bit_length() - 1
        row = self._levels[level]
        return min(int(row[start]), int(row[end - (1 << level)]))
