"""Executions whose results nobody reads are dropped, in any sequence of nodes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stowage.stages.ir.executions import first_runs, needed_runs

CREATES = ((0,), (1,), (2, 3), ())
READS = ((), (0,), (0, 1), (2,))


def is_read(position: int, value: int, order: list[int], kept: list[int], wanted: set[int]) -> bool:
    """Whether what an execution makes is read, by one that is kept or at the end, before it is made again."""
    for later in (p for p in kept if p > position):
        if value in READS[order[later]]:
            return True
        if value in CREATES[order[later]]:
            return False
    return value in wanted


@given(st.lists(st.integers(0, 3), max_size=12), st.sets(st.integers(0, 3)), st.booleans())
def test_what_is_kept_is_what_is_read_or_stays(order: list[int], wanted: set[int], firsts_stay: bool) -> None:
    stays = first_runs(order) if firsts_stay else [False] * len(order)
    left = set(wanted)
    kept = needed_runs(order, stays, left, CREATES.__getitem__, READS.__getitem__)
    for position, node in enumerate(order):
        read = any(is_read(position, value, order, kept, wanted) for value in CREATES[node])
        assert (position in kept) == (stays[position] or read)
    assert left == {value for value in range(4) if is_read(-1, value, order, kept, wanted)}


def test_first_runs() -> None:
    assert first_runs([2, 0, 2, 1, 0]) == [True, True, False, True, False]
