"""What to freeze, as people write it: `Freeze(rate=0.9, policy="ils")`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from stowage.flows.planning.freezing import Freezing
from stowage.stages.freezing.dynamics import DISTANCES
from stowage.stages.freezing.policies import POLICIES, Policy, policy_named
from stowage.stages.freezing.units import UNIT_KINDS
from stowage.stages.ir.errors import ParameterError
from stowage.stages.ir.freezable import OVER, Distance, UnitKind


@dataclass(frozen=True)
class Freeze:
    """Freezes a part of the model in each step; see `fit`.

    Attributes:
        rate: the share of units that is frozen in each step, from 0 to 1, rounded down to whole units.
        policy: `ils` trains the units that moved most when they were last updated (SlimFit), `random` others in each
            step, `round_robin` neighbours in turn, `prefix` always the last units, `progressive` all at first and then
            fewer and fewer of the first; or an object with `choose(step, dynamics) -> names of the units that train`.
        units: `saving` groups parameters that save memory when they are frozen together, `parameter` takes each
            parameter of several dimensions by itself, `block` each entry of a list of modules.
        distance: how far a unit moved: `l1` is ‖Δ‖₁/‖w‖₁, `relative` the mean of |Δ/w|, SlimFit's equation (1).
        seed: of `random`, and of the numbers that units begin with.
        over: the steps after which `progressive` freezes as many units as the rate says.
    """

    rate: float = 0.9
    policy: str | Policy = "ils"
    units: UnitKind = "saving"
    distance: Distance = "l1"
    seed: int = 0
    over: int = OVER

    def __post_init__(self) -> None:
        """Check the attributes.

        Raises:
            ParameterError: one is wrong.
        """
        number = isinstance(self.rate, int | float) and not isinstance(self.rate, bool)
        if not number or not 0 <= self.rate <= 1:
            raise ParameterError(f"freeze.rate is {self.rate!r}: give the share of units to freeze, from 0 to 1.")
        if isinstance(self.policy, str):
            policy_named(self.policy, self.rate, 0)
        elif not callable(getattr(self.policy, "choose", None)):
            raise ParameterError(
                f"freeze.policy is a {type(self.policy).__name__}: give one of {', '.join(POLICIES)}, or an object "
                "with choose(step, dynamics)."
            )
        for name, given, known in (
            ("units", self.units, tuple(UNIT_KINDS)),
            ("distance", self.distance, DISTANCES),
        ):
            if given not in known:
                raise ParameterError(f"freeze.{name} is {given!r}: write one of {', '.join(known)}.")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ParameterError(f"freeze.seed is {self.seed!r}: give a whole number.")
        if isinstance(self.over, bool) or not isinstance(self.over, int) or self.over < 1:
            raise ParameterError(f"freeze.over is {self.over!r}: give the steps until the rate is reached, at least 1.")

    def freezing(self) -> Freezing:
        """Return what planning needs to know of it."""
        policy = self.policy
        if isinstance(policy, str):
            policy = policy_named(policy, self.rate, self.seed, self.over)
        relative = self.distance == "relative"
        return Freezing(self.units, self.rate, policy, measures=self.measures, relative=relative)

    def text(self) -> str:
        """Return all of it in words that are the same in every process; of a policy of others the name of its class."""
        policy = self.policy if isinstance(self.policy, str) else type(self.policy).__name__
        over = f" over {self.over} steps" if policy == "progressive" else ""
        return f"{policy}{over} at {self.rate}, units {self.units}, distance {self.distance}, seed {self.seed}"

    @property
    def measures(self) -> bool:
        """Return whether the policy looks at how far units moved: of ours `ils` alone, of others all."""
        return not isinstance(self.policy, str) or self.policy == "ils"


def freeze_of(freeze: Any) -> Freeze | None:
    """Return the argument `freeze` of `fit` and `stow`.

    Raises:
        ParameterError: it is something else.
    """
    if freeze is not None and not isinstance(freeze, Freeze):
        raise ParameterError(f"freeze is {freeze!r}: give Freeze(rate=..., policy=...), or None to freeze nothing.")
    return freeze


def freezing_of(
    freeze: Freeze | None, optimizer: torch.optim.Optimizer | None, say: Callable[[str], None]
) -> Freezing | None:
    """Return what planning needs to know of what is frozen; None where nothing is.

    Args:
        freeze: what the user asks for.
        optimizer: of the model, if there is one.
        say: is told what the user should know, one sentence each.

    Raises:
        ParameterError: there is no optimizer.
    """
    if freeze is None:
        return None
    if optimizer is None:
        raise ParameterError("freeze leaves parameters out of updates, but there is no optimizer: pass one to fit.")
    return replace(freeze.freezing(), say=say)
