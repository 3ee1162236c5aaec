"""SELECT of Algorithm 8: finds the smallest subset of sizes that reaches a value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

Key = TypeVar("Key", bound="str | int")

MOST_SUMS = 50_000


def select_at_least(sizes: Mapping[Key, int], value: int) -> tuple[Key, ...]:
    """Return keys of a subset whose total is at least `value` and as small as possible; all if their total is less.

    Exact to the byte while at most MOST_SUMS different totals are below `value`: with equal sizes taken together, a
    layer of a transformer has some tens. Beyond, totals within a 4096th of `value` count as equal, and the smaller is
    kept: the answer still reaches `value`, and misses the smallest such total by at most that share for each size.

    Equal inputs give equal answers; among equal sizes the first keys are taken.
    """
    if value <= 0:
        return ()
    by_size: dict[int, list[Key]] = {}
    for key, nbytes in sizes.items():
        by_size.setdefault(nbytes, []).append(key)
    if sum(sizes.values()) <= value:
        return tuple(sizes)
    distinct = sorted((s for s in by_size if s > 0), reverse=True)
    below: dict[int, tuple[int, ...]] = {0: ()}
    best: tuple[int, tuple[int, ...]] | None = None
    for size in distinct:
        following: dict[int, tuple[int, ...]] = {}
        for total, counts in below.items():
            for count in range(len(by_size[size]) + 1):
                reached = total + count * size
                if reached >= value:
                    if best is None or reached < best[0]:
                        best = (reached, (*counts, count))
                    break
                following.setdefault(reached, (*counts, count))
        below = following if len(following) <= MOST_SUMS else _thinned(following, value)
    assert best is not None
    return tuple(key for size, count in zip(distinct, best[1]) for key in by_size[size][:count])


def select_at_most(sizes: Mapping[Key, int], value: int) -> tuple[Key, ...]:
    """Return keys of a subset whose total is at most `value` and as large as possible: the rest is SELECTed."""
    left_out = set(select_at_least(sizes, sum(sizes.values()) - value))
    return tuple(key for key in sizes if key not in left_out)


def _thinned(sums: dict[int, tuple[int, ...]], value: int) -> dict[int, tuple[int, ...]]:
    found: dict[int, tuple[int, tuple[int, ...]]] = {}
    for total in sorted(sums):
        found.setdefault(total * 4096 // value, (total, sums[total]))
    return dict(found.values())
