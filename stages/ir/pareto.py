"""Filters things that compete in several costs at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


def undominated(ordered: Iterable[T], no_worse: Callable[[T, T], bool]) -> list[T]:
    """Return the items that no earlier item dominates; of equal ones the first.

    Args:
        ordered: items, cheapest first in one of the costs, so that nothing dominates an earlier item.
        no_worse: says whether the first is no worse than the second in every respect.
    """
    kept: list[T] = []
    for item in ordered:
        if not any(no_worse(other, item) for other in kept):
            kept.append(item)
    return kept
