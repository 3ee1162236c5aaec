"""The units of a step that freezes: groups of parameters, each of which trains or is frozen as a whole in a step.

A set of units is a number with one bit for each: `ALWAYS` is bit 0, which every mask has, so that what must run in
every step is a set like any other. Something with the guard `g` runs under the mask `m` if `g & m`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

ALWAYS = 1
"""The guard of what runs in every step."""


@dataclass(frozen=True)
class Unit:
    """Some parameters that train or are frozen together.

    Attributes:
        name: for people, and in generated code.
        parameters: their names.
    """

    name: str
    parameters: tuple[str, ...]


def bit(position: int) -> int:
    """Return the set of the unit at a position."""
    return 2 << position


def bits_of(units: Sequence[Unit]) -> dict[str, int]:
    """Return the set of each parameter's unit; parameters that are in none always train."""
    return {name: bit(i) for i, unit in enumerate(units) for name in unit.parameters}


def mask_of(units: Sequence[Unit], active: Iterable[str]) -> int:
    """Return the mask under which the units of these names train."""
    chosen = set(active)
    return ALWAYS | sum(bit(i) for i, unit in enumerate(units) if unit.name in chosen)


def names_in(units: Sequence[Unit], guard: int) -> list[str]:
    """Return the names of the units in a set."""
    return [unit.name for i, unit in enumerate(units) if guard & bit(i)]


def joined(*guards: int) -> int:
    """Return the guard of what runs where one of several does."""
    found = 0
    for guard in guards:
        found |= guard
    return ALWAYS if found & ALWAYS else found


def implies(one: int, other: int) -> bool:
    """Return whether under every mask that has something of one set it has something of the other."""
    return bool(other & ALWAYS) or not one & ~other


def spans(units: Sequence[Unit], guard: int) -> list[str]:
    """Return the names of the units in a set; of three and more neighbours the first, "" for "to", and the last."""
    inside = [bool(guard & bit(i)) for i in range(len(units))]
    found: list[str] = []
    position = 0
    for within, run in groupby(inside):
        length = len(list(run))
        names = [unit.name for unit in units[position : position + length]]
        if within:
            found += names if length < 3 else [names[0], "", names[-1]]
        position += length
    return found
