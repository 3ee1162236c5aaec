"""What a plan may leave out in a step: units of parameters, of which a few train at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from stowage.stages.ir.units import Unit

UnitKind = Literal["saving", "parameter", "block"]
"""How parameters are grouped into units, see `freezing.units`."""

Distance = Literal["l1", "relative"]
"""How the distance of a unit's move is measured.

`l1` is ‖Δ‖₁/‖w‖₁ over all the unit's elements; `relative` is the mean of |Δ/w| over them, equation (1) of SlimFit.
"""

PolicyName = Literal["ils", "random", "progressive", "round_robin", "prefix"]
"""The policies that choose what trains, see `freezing.policies`."""


@dataclass(frozen=True)
class Freezable:
    """The units of a step, and how many of them a policy ever lets train at once.

    Attributes:
        units: groups of parameters; parameters in none always train.
        active: number of units that may train in a step.
    """

    units: tuple[Unit, ...]
    active: int

    @property
    def frozen_share(self) -> float:
        """Return the share of units that is frozen in each step at least."""
        return 1 - self.active / len(self.units)


OVER = 1000
"""Default of `over`: the steps in which `progressive` reaches its rate."""


@dataclass(frozen=True)
class FreezeChoice:
    """What a run of the pipeline freezes; `freezing.json` beside the plan.

    Attributes:
        policy: the name of the policy; empty where nothing is frozen.
        rate: the share of units that is frozen.
        units: the kind of units.
        distance: how far a unit moved.
        seed: of the policy's draws, and of the numbers that units begin with.
        over: the steps after which `progressive` freezes as many units as the rate says.
    """

    policy: str = ""
    rate: float = 0.0
    units: UnitKind = "saving"
    distance: Distance = "l1"
    seed: int = 0
    over: int = OVER

    @property
    def measures(self) -> bool:
        """Return whether the policy looks at how far units moved."""
        return self.policy == "ils"

    @property
    def relative(self) -> bool:
        """Return whether moves are measured element by element."""
        return self.distance == "relative"
