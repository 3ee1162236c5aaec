"""Chooses which units train in a step: the policies of SlimFit and those that it is compared with.

A policy is any object with `choose(step, dynamics)`. `dynamics` has a number for every unit, in the order of the model:
how much the unit moved when it was last updated (see `dynamics`). A policy may also have `state_dict()` and
`load_state_dict(state)`, of what JSON can hold, which checkpoints keep; and `most_active(units)`, the number of units
that it never exceeds, by which memory is planned. None of them touches the random generators of the training.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from stowage.stages.ir.errors import ParameterError
from stowage.stages.ir.freezable import OVER, PolicyName


class Policy(Protocol):
    """Chooses the units that train in a step."""

    def choose(self, step: int, dynamics: Mapping[str, float]) -> Collection[str]:
        """Return the names of the units that train in this step, the first being step 0."""
        ...


def active_count(units: int, rate: float) -> int:
    """Return how many of the units train where this share of them is frozen: ⌊rate · units⌋ are (Algorithm 1)."""
    return units - int(units * rate)


@dataclass(frozen=True)
class Rated:
    """Freezes the same share of the units in every step.

    Attributes:
        rate: the freezing rate F, from 0 to 1.
    """

    rate: float

    def most_active(self, units: int) -> int:
        """Return the number of units that train in a step, of so many."""
        return active_count(units, self.rate)


@dataclass(frozen=True)
class Ils(Rated):
    """Trains the units that moved most when they were last updated (Algorithm 1 of SlimFit)."""

    def choose(self, step: int, dynamics: Mapping[str, float]) -> Collection[str]:
        """Freeze those with the smallest dynamics; of equal ones those that come first in the model."""
        ranked = sorted(dynamics, key=dynamics.__getitem__)
        return ranked[len(ranked) - self.most_active(len(ranked)) :]


@dataclass(frozen=True)
class Random(Rated):
    """Trains units drawn anew in each step.

    Attributes:
        seed: seed of its own draws; step and seed decide them, so that nothing has to be stored.
    """

    seed: int = 0

    def choose(self, step: int, dynamics: Mapping[str, float]) -> Collection[str]:
        """Draw the units of a step, each set of that size equally likely."""
        draws = random.Random(f"{self.seed} {step}")
        return draws.sample(list(dynamics), self.most_active(len(dynamics)))


@dataclass(frozen=True)
class Progressive(Rated):
    """Trains everything at first, and freezes more and more of the first units, up to the rate.

    Attributes:
        over: the steps after which as many are frozen as the rate says.
    """

    over: int = OVER

    def choose(self, step: int, dynamics: Mapping[str, float]) -> Collection[str]:
        """Freeze a part of the first units that grows with the step."""
        units = list(dynamics)
        frozen = len(units) - active_count(len(units), self.rate * min(1.0, step / max(1, self.over)))
        return units[frozen:]

    def most_active(self, units: int) -> int:
        """Return all units: the first step trains them."""
        return units


@dataclass(frozen=True)
class RoundRobin(Rated):
    """Trains neighbouring units, the next ones in each step, and begins again at the front."""

    def choose(self, step: int, dynamics: Mapping[str, float]) -> Collection[str]:
        """Take the units that follow those of the step before."""
        units = list(dynamics)
        many = self.most_active(len(units))
        return [units[(step * many + i) % len(units)] for i in range(many)]


@dataclass(frozen=True)
class Prefix(Rated):
    """Freezes the first units for good, and trains the last."""

    def choose(self, step: int, dynamics: Mapping[str, float]) -> Collection[str]:
        """Take the last units."""
        units = list(dynamics)
        return units[len(units) - self.most_active(len(units)) :]


POLICIES: dict[PolicyName, Callable[[float, int, int], Policy]] = {
    "ils": lambda rate, seed, over: Ils(rate),
    "random": lambda rate, seed, over: Random(rate, seed),
    "progressive": lambda rate, seed, over: Progressive(rate, over),
    "round_robin": lambda rate, seed, over: RoundRobin(rate),
    "prefix": lambda rate, seed, over: Prefix(rate),
}
"""Makes each policy of its rate, a seed, and the steps that `progressive` takes, by the names that people write."""


def policy_named(name: str, rate: float, seed: int, over: int = OVER) -> Policy:
    """Return the policy of that name.

    Args:
        name: one of `POLICIES`.
        rate: the freezing rate F, from 0 to 1.
        seed: of what it draws.
        over: the steps after which `progressive` freezes as many units as the rate says.

    Raises:
        ParameterError: there is none.
    """
    for known, make in POLICIES.items():
        if known == name:
            return make(rate, seed, over)
    raise ParameterError(f"freeze.policy is {name!r}: write one of {', '.join(POLICIES)}.")


def most_active(policy: Policy, units: int, rate: float) -> int:
    """Return the number of units that a policy never exceeds, as it says itself, else by the rate.

    Raises:
        ParameterError: what it says is no whole number of at least 0.
    """
    says: Callable[[int], object] | None = getattr(policy, "most_active", None)
    if says is None:
        return active_count(units, rate)
    said = says(units)
    try:
        most = -1 if isinstance(said, bool) else operator.index(said)  # type: ignore[arg-type]
    except TypeError:
        most = -1
    if most < 0:
        raise ParameterError(
            f"The policy {type(policy).__name__} says {ascii(said)[:60]} of most_active({units}): return a whole "
            f"number from 0 to {units}."
        )
    return min(most, units)
