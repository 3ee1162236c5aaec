"""Rounds the relaxation of a MILP whose integers choose one of several options at each of many places.

The relaxation of a long chain of equal blocks mixes two options at many of them, in equal shares: one block in ten has
the one, as it were. Rounding each to its larger share gives up what the smaller one stood for, at every block. So one
block is rounded at a time, in the largest set of blocks that mix the same options, to the option that is rarest there
or to the one that is most common, whichever loses less and leaves fewer mixed; the linear program is solved again from
where it was, and the other blocks make up for it.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

UNUSED = 1e-6
"""Share up to which a relaxation does not use an option."""

MIXED = 5e-5
"""Share of the objective that a place which is still mixed counts for: what rounding it may lose."""

WORST = 0.05
"""Share of the objective by which it may rise before rounding ends without an answer."""


@dataclass(frozen=True)
class Rounded:
    """What rounding comes to.

    Attributes:
        bound: the optimum of the relaxation; None where there is none.
        objective: of the answer.
        values: of all columns; empty where no answer was found.
    """

    bound: float | None
    objective: float = 0.0
    values: Sequence[float] = ()


def rounded(model: Any, choices: Sequence[Sequence[int]], kinds: Sequence[int], until_s: float) -> Rounded:
    """Solve the relaxation, then round choice by choice.

    Args:
        model: a `highspy.Highs` with the program, to be minimised.
        choices: columns of which exactly one is 1, for each choice; all other columns are continuous.
        kinds: a number for each choice, equal where the same options mean the same.
        until_s: when to end, on the clock of `time.monotonic`.
    """
    return _Rounding(model, choices, kinds, until_s).run()


class _Rounding:
    def __init__(self, model: Any, choices: Sequence[Sequence[int]], kinds: Sequence[int], until_s: float) -> None:
        import highspy

        self._optimal = highspy.HighsModelStatus.kOptimal
        self._model, self._choices, self._kinds, self._until_s = model, choices, kinds, until_s
        self._upper = list(model.getLp().col_upper_)
        for column in (column for choice in choices for column in choice):
            model.changeColIntegrality(column, highspy.HighsVarType.kContinuous)

    def run(self) -> Rounded:
        """Return the answer."""
        found = self._solved()
        if found is None:
            return Rounded(None)
        bound, values = found
        objective = bound
        while mixed := self._mixed(values):
            best, before = None, objective + MIXED * abs(bound) * len(mixed)
            place, options = self._next(mixed, values)
            for option in options:
                self._fix(place, option)
                found = self._solved()
                if found is not None:
                    left = len(self._mixed(found[1]))
                    score = found[0] + MIXED * abs(bound) * left
                    if best is None or score < best[0]:
                        best = score, option, found
                self._free(place)
                if best is not None and best[0] <= before:
                    break
            if best is None or best[2][0] > bound + WORST * abs(bound):
                return Rounded(bound)
            self._fix(place, best[1])
            objective, values = best[2]
        return Rounded(bound, objective, values)

    def _mixed(self, values: Sequence[float]) -> list[int]:
        """Return the choices that are not made yet."""
        return [i for i, choice in enumerate(self._choices) if sum(values[c] > UNUSED for c in choice) > 1]

    def _next(self, mixed: Sequence[int], values: Sequence[float]) -> tuple[int, tuple[int, ...]]:
        """Return the choice to make, in the middle of the largest set of like ones, and options for it."""
        alike: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for i in mixed:
            mixes = (o for o, column in enumerate(self._choices[i]) if values[column] > UNUSED)
            alike[self._kinds[i], *mixes].append(i)
        (_, *used), places = max(alike.items(), key=lambda each: (len(each[1]), each[0]))
        total = {o: sum(values[self._choices[i][o]] for i in places) for o in used}
        by_share = sorted(used, key=lambda o: total[o])
        return places[len(places) // 2], (by_share[0], by_share[-1])

    def _fix(self, place: int, option: int) -> None:
        for o, column in enumerate(self._choices[place]):
            self._model.changeColBounds(column, float(o == option), float(o == option))

    def _free(self, place: int) -> None:
        for column in self._choices[place]:
            self._model.changeColBounds(column, 0.0, self._upper[column])

    def _solved(self) -> tuple[float, list[float]] | None:
        """Solve the linear program from where it was; None where it has no answer, or time is over."""
        left_s = self._until_s - time.monotonic()
        if left_s <= 0:
            return None
        self._model.setOptionValue("time_limit", self._model.getRunTime() + left_s)
        self._model.run()
        if self._model.getModelStatus() != self._optimal:
            return None
        return self._model.getInfo().objective_function_value, list(self._model.getSolution().col_value)
