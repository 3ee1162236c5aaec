"""Freezes parts of a model in the steps of a training: tells programs what trains, and measures how far it moves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import nn

from stowage.stages.freezing.policies import Policy
from stowage.stages.freezing.schedule import Schedule
from stowage.stages.ir.freezable import Distance, Freezable
from stowage.stages.runtime import Program
from stowage.stages.runtime.moves import Moves
from stowage.stages.runtime.offload.offloading import Offloading


class FrozenTraining:
    """Runs steps with what the policy lets train.

    Attributes:
        schedule: chooses what trains.
    """

    def __init__(self, freezable: Freezable, policy: Policy, seed: int, distance: Distance | None) -> None:
        """Begin a training; without a `distance` nobody asks how far units move."""
        self.schedule = Schedule(freezable, policy, seed)
        self._moves = Moves(freezable.units, distance == "relative") if distance is not None else None
        self._offloading: Offloading | None = None

    def frozen_parameters(self) -> frozenset[str]:
        """Return the parameters that are frozen in the step under way."""
        active = self.schedule.active()
        units = self.schedule.freezable.units
        return frozenset(name for unit in units if unit.name not in active for name in unit.parameters)

    def begin(self, program: Program) -> None:
        """Tell a program what trains when it runs next."""
        program.active.choose(self.schedule.active())
        program.moves = self._moves
        self._offloading = program.offloading if self._moves is not None else None

    def ended(self) -> None:
        """Take in that a step has updated; updates by the CPU that are still under way are waited for."""
        if self._offloading is not None:
            self._offloading.await_updates()
        self.schedule.ended(self._moves.take() if self._moves is not None else {})

    @contextmanager
    def in_plain(self, model: nn.Module) -> Iterator[None]:
        """Freeze for a step of plain PyTorch: what is frozen requires no gradient inside."""
        frozen = self.frozen_parameters()
        changed = [p for name, p in model.named_parameters() if name in frozen and p.requires_grad]
        for parameter in changed:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in changed:
                parameter.requires_grad_(True)

    def measured(self, model: nn.Module) -> AbstractContextManager[None]:
        """Measure how far an update of plain PyTorch moves what trains."""
        if self._moves is None:
            return nullcontext()
        return self._moves.of({name: p for name, p in model.named_parameters() if p.grad is not None})

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint holds."""
        return self.schedule.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what a checkpoint holds.

        Raises:
            PlanMismatchError: it is of another policy, or of other units.
        """
        self.schedule.load_state_dict(state)
