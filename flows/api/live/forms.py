"""Finds how a number in a recorded step follows from a number of the user's.

Either it is that number, or a form of it so simple that three values are enough to recognise it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from stowage.stages.trace.calls.numbers import Number, Spot
from stowage.stages.workload.surroundings import same_value

ENOUGH = 3
"""Number of different values that identify a form, or show that a value does not matter."""
KEPT = 16
"""Number of records that are remembered besides the first."""

_FORMS: dict[str, Callable[[Any], Any]] = {
    "{}": lambda v: v,
    "-{}": lambda v: -v,
    "1 - {}": lambda v: 1 - v,
    "{} - 1": lambda v: v - 1,
    "1 + {}": lambda v: 1 + v,
    "1 / {}": lambda v: 1 / v,
    "1 / (1 - {})": lambda v: 1 / (1 - v),
    "{} * {}": lambda v: v * v,
    "2 * {}": lambda v: 2 * v,
    "{} / 2": lambda v: v / 2,
    "float({})": float,
    "-float({})": lambda v: -float(v),
}


class Follows(NamedTuple):
    """A number that follows from the value at a path."""

    path: str
    form: str

    @property
    def text(self) -> str:
        """Return the form in words, which also names the number in generated code."""
        return self.form.replace("{}", self.path)

    def of(self, value: Any) -> Number | None:
        """Return the number that follows from a value; None where it cannot be computed."""
        try:
            result: Number = _FORMS[self.form](value)
        except (ArithmeticError, TypeError, ValueError):
            return None
        return result


@dataclass
class Samples:
    """Values of the user's numbers and of the numbers in the step, in every record of one step.

    Attributes:
        before: path -> its value in the first record, for paths whose value has changed since.
        base: spot -> its number in the first record, for numbers that have changed since.
        later: for each further record, the value at each path and the number at each spot.
        follows: spot -> what its number follows from, where that is known.
        live: paths of numbers whose every effect on the step is known.
    """

    before: dict[str, Any] = field(default_factory=dict)
    base: dict[Spot, Number] = field(default_factory=dict)
    later: list[tuple[dict[str, Any], dict[Spot, Number]]] = field(default_factory=list)
    follows: dict[Spot, Follows | None] = field(default_factory=dict)
    live: set[str] = field(default_factory=set)

    def add(self, changed: Mapping[str, tuple[Any, Any]], numbers: Mapping[Spot, tuple[Number, Number]]) -> None:
        """Add a record: what has changed since the first, and which numbers differ from it."""
        for path, (old, _) in changed.items():
            self.before.setdefault(path, old)
        for spot, (old, _) in numbers.items():
            self.base.setdefault(spot, old)
        self.later.append(({p: new for p, (_, new) in changed.items()}, {s: new for s, (_, new) in numbers.items()}))
        del self.later[:-KEPT]
        self.follows = {spot: self._explain(spot, self.follows.get(spot)) for spot in self.base}
        self.live = self._live()

    def values(self, path: str) -> list[Any]:
        """Return the different values that were seen at a path."""
        found: list[Any] = []
        for value in [self.before[path], *(at.get(path, self.before[path]) for at, _ in self.later)]:
            if not any(same_value(value, known) for known in found):
                found.append(value)
        return found

    def _explain(self, spot: Spot, known: Follows | None) -> Follows | None:
        numbers = [self.base[spot], *(found.get(spot, self.base[spot]) for _, found in self.later)]
        paths = [path for path, value in self.before.items() if is_number(value)]
        candidates = [Follows(path, form) for form in _FORMS for path in paths]
        for candidate in [known] if known is not None else []:
            candidates.insert(0, candidate)
        for candidate in candidates:
            first = self.before[candidate.path]
            values = [first, *(at.get(candidate.path, first) for at, _ in self.later)]
            if all(same_value(candidate.of(v), n) for v, n in zip(values, numbers, strict=True)):
                return candidate
        return None

    def _live(self) -> set[str]:
        if not self.follows or any(follows is None for follows in self.follows.values()):
            return set()
        paths = {follows.path for follows in self.follows.values() if follows is not None}
        return {path for path in paths if len(self.values(path)) >= ENOUGH}

    def is_ordinary(self, path: str, value: Any) -> bool:
        """Return whether the step surely treats a value as it treated those before.

        It has a type and sign seen before, and is none of the numbers that code often treats specially.
        """
        seen = self.values(path)
        if any(same_value(value, known) for known in seen):
            return True
        alike = [v for v in seen if type(v) is type(value) and (v > 0) == (value > 0) and v not in (0, 1, -1)]
        return bool(alike) and math.isfinite(value) and value not in (0, 1, -1)


def is_number(value: Any) -> bool:
    """Return whether a value is a number that a step may compute with."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)
