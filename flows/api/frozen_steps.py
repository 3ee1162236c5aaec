"""Freezes parts of a model in the steps of a training: tells programs what trains, and measures how far it moves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stowage.flows.api.freeze import Freeze
from stowage.flows.planning.freezing import Freezing
from stowage.stages.freezing.schedule import Schedule
from stowage.stages.runtime import Program
from stowage.stages.runtime.moves import Moves


class FrozenSteps:
    """Runs steps with what the policy lets train.

    Attributes:
        freezing: the units and the policy.
    """

    def __init__(self, freeze: Freeze, freezing: Freezing) -> None:
        self.freezing = freezing
        self._freeze = freeze
        self._schedule: Schedule | None = None
        self._state: Mapping[str, Any] | None = None
        self._moves: Moves | None = None

    @property
    def schedule(self) -> Schedule | None:
        """Return what chooses, once a step has been planned."""
        if self._schedule is None and self.freezing.found is not None:
            self._schedule = Schedule(self.freezing.found, self.freezing.policy, self._freeze.seed)
            if self._state is not None:
                self._schedule.load_state_dict(self._state)
                self._state = None
        return self._schedule

    def frozen_parameters(self) -> frozenset[str]:
        """Return the parameters that are frozen in the step under way; none before anything is planned."""
        if self.schedule is None:
            return frozenset()
        active = self.schedule.active()
        return frozenset(
            n for unit in self.schedule.freezable.units if unit.name not in active for n in unit.parameters
        )

    def begin(self, program: Program) -> None:
        """Tell a program what trains when it runs next."""
        schedule = self.schedule
        assert schedule is not None
        program.active.choose(schedule.active())
        if self._freeze.measures and self._moves is None:
            self._moves = Moves(schedule.freezable.units, self._freeze.distance == "relative")
        program.moves = self._moves

    def ended(self) -> None:
        """Take in that a step has updated."""
        assert self.schedule is not None
        self.schedule.ended(self._moves.take() if self._moves is not None else {})

    def state_dict(self) -> dict[str, Any] | None:
        """Return what a checkpoint holds."""
        return self.schedule.state_dict() if self.schedule is not None else None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what a checkpoint holds.

        Raises:
            PlanMismatchError: it is of another policy, or of other units.
        """
        if self.schedule is not None:
            self.schedule.load_state_dict(state)
        else:
            self._state = state
