"""Freezes parts of a model in the steps of `fit`, from the first that is planned on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stowage.flows.api.freeze import Freeze
from stowage.flows.planning.freezing import Freezing
from stowage.stages.freezing.schedule import Schedule
from stowage.stages.ir.errors import ParameterError
from stowage.stages.runtime import Program
from stowage.stages.runtime.sharding.ranks import Ranks
from stowage.stages.train.frozen import FrozenTraining


class FrozenSteps:
    """Runs steps with what the policy lets train, once their units are known.

    Attributes:
        freezing: the units and the policy.
    """

    def __init__(self, freeze: Freeze, freezing: Freezing, ranks: Ranks | None = None) -> None:
        self.freezing = freezing
        self._ranks = ranks
        self._freeze = freeze
        self._training: FrozenTraining | None = None
        self._state: Mapping[str, Any] | None = None

    @property
    def writes(self) -> bool:
        """Return whether this process writes files for all."""
        return self._ranks is None or self._ranks.rank == 0

    def _found(self) -> FrozenTraining | None:
        if self._training is None and self.freezing.found is not None:
            distance = self._freeze.distance if self._freeze.measures else None
            seed = self._freeze.seed
            found = FrozenTraining(self.freezing.found, self.freezing.policy, seed, distance, self._ranks)
            if self._state is not None:
                found.load_state_dict(self._state)
                self._state = None
            self._training = found
        return self._training

    @property
    def schedule(self) -> Schedule:
        """Return what chooses.

        Raises:
            ParameterError: no step has been planned, so that there are no units yet.
        """
        found = self._found()
        if found is None:
            raise ParameterError(
                "Nothing is planned yet, so that there are no units: call the step, or `prepare`, first."
            )
        return found.schedule

    def frozen_parameters(self) -> frozenset[str]:
        """Return the parameters that are frozen in the step under way; none before anything is planned.

        Ranks choose together, in the step itself: before that they freeze nothing.
        """
        found = self._found()
        if found is None or (self._ranks is not None and not found.schedule.chosen):
            return frozenset()
        return found.frozen_parameters()

    def begin(self, program: Program) -> None:
        """Tell a program what trains when it runs next."""
        found = self._found()
        assert found is not None
        found.begin(program)

    def ended(self) -> None:
        """Take in that a step has updated."""
        assert self._training is not None
        self._training.ended()

    def state_dict(self) -> dict[str, Any] | None:
        """Return what a checkpoint holds; None before anything is planned."""
        found = self._found()
        return found.state_dict() if found is not None else None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what a checkpoint holds.

        Raises:
            PlanMismatchError: it is of another policy, or of other units.
        """
        found = self._found()
        if found is None:
            self._state = state
        else:
            found.load_state_dict(state)
