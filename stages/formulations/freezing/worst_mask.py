"""Finds the units that take most memory when they train together, over all rows of a plan.

It is exact: a row is passed over only where a bound says that no mask takes more there than one that is known. Rows
with much memory come first, so that most others fall under a bound: everything at the row; the row's guards of several
units with the largest of one; and what a row that is solved takes, with what this one has more of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stowage.stages.formulations.freezing.coverage import Covered, by_first_unit, quick_bound, solved_coverage
from stowage.stages.ir.masked_bytes import MaskedBytes
from stowage.stages.ir.units import ALWAYS
from stowage.stages.solver.outcome import SolverSettings

COMPARED = 24
"""Solved rows that another is compared with, the latest."""


@dataclass(frozen=True)
class WorstMask:
    """The mask that takes most.

    Attributes:
        nbytes: the highest bytes under the mask.
        mask: the units that train.
        row: where these bytes are reached.
        bound_bytes: no mask takes more at any row; the same, unless a solver ran out of time.
        solved_rows: rows of which a solver was asked.
    """

    nbytes: int
    mask: int
    row: int
    bound_bytes: int
    solved_rows: int


def worst_mask(levels: Sequence[MaskedBytes], count: int, k: int, settings: SolverSettings) -> WorstMask:
    """Return the mask of at most k of so many units that takes most.

    Args:
        levels: the bytes of each row, by guard.
        count: number of units.
        k: number of units that may train.
        settings: limits of one solve.
    """
    none = min([-1, *(level.under(ALWAYS) - 1 for level in levels)])  # less than any row takes under any worst mask
    best = WorstMask(none, ALWAYS, -1, none, 0)
    bound, asked = none, 0
    known: list[tuple[Mapping[int, int], int]] = []
    for level in sorted(levels, key=lambda level: (-level.total, level.row)):
        if not _has_negative(level.by_guard) and level.total <= best.nbytes:
            break
        guards = level.by_guard
        if quick_bound(guards, k) <= best.nbytes or any(
            most + _more(guards, other) <= best.nbytes for other, most in known[-COMPARED:]
        ):
            continue
        found = by_first_unit(guards, count, k)
        if not found.proven and found.bound_bytes > best.nbytes:
            asked += 1
            found = _better(found, solved_coverage(guards, count, k, settings))
        known.append((guards, found.bound_bytes))
        bound = max(bound, found.bound_bytes)
        if found.nbytes > best.nbytes:
            best = WorstMask(found.nbytes, found.mask, level.row, bound, asked)
            best = _highest(levels, best)
    return WorstMask(best.nbytes, best.mask, best.row, max(bound, best.nbytes), asked)


def _better(one: Covered, other: Covered) -> Covered:
    best = max(one, other, key=lambda c: c.nbytes)
    return Covered(best.nbytes, best.mask, max(best.nbytes, min(one.bound_bytes, other.bound_bytes)))


def _highest(levels: Sequence[MaskedBytes], best: WorstMask) -> WorstMask:
    """Return a mask with the row at which it takes most."""
    top = max(levels, key=lambda level: level.under(best.mask))
    return WorstMask(max(best.nbytes, top.under(best.mask)), best.mask, top.row, best.bound_bytes, best.solved_rows)


def _more(one: Mapping[int, int], other: Mapping[int, int]) -> int:
    """Return bytes by which one row takes at most more than another, under any mask."""
    fixed = one.get(ALWAYS, 0) - other.get(ALWAYS, 0)
    differing = (one.get(g, 0) - other.get(g, 0) for g in one.keys() | other.keys() if g != ALWAYS)
    return fixed + sum(d for d in differing if d > 0)


def _has_negative(by_guard: Mapping[int, int]) -> bool:
    return any(nbytes < 0 for nbytes in by_guard.values())
