"""How a number in a recorded step follows from a number of the user's: as it is, or by a form so simple that three
values tell it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from stowage.stages.trace.calls.numbers import Number, Spot
from stowage.stages.workload.surroundings import same_value

ENOUGH = 3
"""Different values that tell a form, or that something does not matter."""
KEPT = 16
"""Records that are remembered beside the first."""

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
        """For people, and the name of the number in generated code."""
        return self.form.replace("{}", self.path)

    def of(self, value: Any) -> Number | None:
        """The number for a value; None where there is none."""
        try:
            result: Number = _FORMS[self.form](value)
        except (ArithmeticError, TypeError, ValueError):
            return None
        return result


@dataclass
class Samples:
    """Values of the user's numbers, and of those in the step, in every record of one step.

    Attributes:
        before: what was at each path when the step was recorded first, of those that have changed since.
        base: the numbers of that record, of those that have changed since.
        later: of each further record: what is at each path, and the numbers.
        follows: what each number follows from, where that is known.
        live: paths of numbers whose every trace in the step is known.
    """

    before: dict[str, Any] = field(default_factory=dict)
    base: dict[Spot, Number] = field(default_factory=dict)
    later: list[tuple[dict[str, Any], dict[Spot, Number]]] = field(default_factory=list)
    follows: dict[Spot, Follows | None] = field(default_factory=dict)
    live: set[str] = field(default_factory=set)

    def add(self, changed: Mapping[str, tuple[Any, Any]], numbers: Mapping[Spot, tuple[Number, Number]]) -> None:
        """One more record: what has changed since the first, and which numbers differ from it."""
        for path, (old, _) in changed.items():
            self.before.setdefault(path, old)
        for spot, (old, _) in numbers.items():
            self.base.setdefault(spot, old)
        self.later.append(({p: new for p, (_, new) in changed.items()}, {s: new for s, (_, new) in numbers.items()}))
        del self.later[:-KEPT]
        self.follows = {spot: self._explain(spot, self.follows.get(spot)) for spot in self.base}
        self.live = self._live()

    def values(self, path: str) -> list[Any]:
        """Different values that were seen at a path."""
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
        """A value that the step surely treats as it treated those before: no other type or sign, nor one that is often
        treated apart."""
        seen = self.values(path)
        if any(same_value(value, known) for known in seen):
            return True
        alike = [v for v in seen if type(v) is type(value) and (v > 0) == (value > 0) and v not in (0, 1, -1)]
        return bool(alike) and math.isfinite(value) and value not in (0, 1, -1)


def is_number(value: Any) -> bool:
    """A number that a step may compute with."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)
