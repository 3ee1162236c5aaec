"""Keeps the training dynamics of units: how much each moved when it was last updated.

Before its first update a unit has a large random number, so that every unit is updated once before any numbers are
compared (section 3.2 of SlimFit). The numbers are drawn from a seed, not from the generators of the training.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from typing import get_args

from stowage.stages.ir.freezable import Distance

DISTANCES: tuple[Distance, ...] = get_args(Distance)

LARGE = 1e10
"""Factor of the random numbers that units begin with."""


class Dynamics:
    """The dynamics of all units, in the order of the model."""

    def __init__(self, units: Iterable[str], seed: int) -> None:
        draws = random.Random(f"dynamics {seed}")
        self._of = {name: LARGE * draws.random() for name in units}

    def all(self) -> Mapping[str, float]:
        """Return the number of each unit."""
        return dict(self._of)

    def moved(self, distances: Mapping[str, float]) -> None:
        """Take in how far the units moved that were updated."""
        self._of.update({name: value for name, value in distances.items() if name in self._of})

    def state_dict(self) -> dict[str, float]:
        """Return what `load_state_dict` takes."""
        return dict(self._of)

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Take over stored numbers; units that are not among them keep theirs."""
        self.moved(state)
