"""What a plan may leave out in a step: units of parameters, of which a few train at a time."""

from __future__ import annotations

from dataclasses import dataclass

from stowage.stages.ir.units import Unit


@dataclass(frozen=True)
class Freezable:
    """The units of a step, and how many of them a policy ever lets train at once.

    Attributes:
        units: groups of parameters; parameters in none always train.
        active: number of units that may train in a step.
    """

    units: tuple[Unit, ...]
    active: int
