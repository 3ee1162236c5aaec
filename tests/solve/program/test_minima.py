"""Minima over stretches, against numpy's."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stowage.stages.solve.program.range_minima import RangeMinima


@given(st.lists(st.integers(-1000, 1000), min_size=1, max_size=70))
def test_every_stretch(values: list[int]) -> None:
    array = np.array(values, dtype=np.int64)
    minima = RangeMinima(array)
    for start in range(len(values)):
        for end in range(start + 1, len(values) + 1):
            assert minima.of(start, end) == min(values[start:end])


def test_later_changes_do_not_count() -> None:
    array = np.array([3, 1, 2], dtype=np.int64)
    minima = RangeMinima(array)
    array[:] = 0
    assert minima.of(0, 3) == 1
