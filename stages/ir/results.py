"""Flattens the results of a call: an operator's results may have lists of tensors in them (`(Tensor, Tensor[])`).

`groups` has the length of the list for each result, `ALONE` for a single tensor; it is empty where no result is a list.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

T = TypeVar("T")

ALONE = -1
"""Marks, in the place of a length, a result that is no list."""


def flat_results(result: Any) -> list[Any]:
    """Return every result of a call, those of a list one after the other."""
    if not isinstance(result, (list, tuple)):
        return [result]
    return [item for one in result for item in (one if isinstance(one, (list, tuple)) else (one,))]


def groups_of(result: Any) -> tuple[int, ...]:
    """Return how the results of a call are grouped."""
    if not isinstance(result, (list, tuple)) or not any(isinstance(one, (list, tuple)) for one in result):
        return ()
    return tuple(len(one) if isinstance(one, (list, tuple)) else ALONE for one in result)


def grouped(flat: Sequence[T], groups: Sequence[int]) -> list[T | list[T]]:
    """Group flat results as the call returns them."""
    if not groups:
        return list(flat)
    found: list[T | list[T]] = []
    start = 0
    for length in groups:
        found.append(flat[start] if length == ALONE else list(flat[start : start + length]))
        start += 1 if length == ALONE else length
    return found


def places(groups: Sequence[int], count: int) -> list[tuple[int, ...]]:
    """Return, for each of `count` flat results, the indices that lead to it."""
    if not groups:
        return [(i,) for i in range(count)]
    return [
        place
        for i, length in enumerate(groups)
        for place in ([(i,)] if length == ALONE else [(i, j) for j in range(length)])
    ]
