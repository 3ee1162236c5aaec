"""Observes a planned iteration while it runs: its gradients, and the generators before updates."""

from __future__ import annotations

import torch

from stowage.flows.api.check.agreement import close
from stowage.flows.api.check.plain_step import PlainStep
from stowage.stages.runtime import Program
from stowage.stages.runtime.random.generators import GeneratorStates


class Observer:
    """Observes a planned iteration while it runs.

    Attributes:
        wrong: parameters whose gradient differs from `whole`'s, in order.
        late: updates ran and there was no room to keep the generators' state before them, so the state includes what
            the
            updates drew.
    """

    def __init__(self, program: Program, whole: PlainStep | None, *, has_room: bool) -> None:
        """Observe one iteration; `has_room` says whether a generator's state fits the budget at the plan's peak."""
        self._has_room = has_room
        self.wrong: list[str] = []
        self.late = False
        self._program = program
        self._whole = whole
        self._before_updates: GeneratorStates | None = None

    def on_update(self, name: str, gradient: torch.Tensor) -> None:
        """Compare a gradient before its update, and keep the generators' state before the first; see `Program`."""
        if self._before_updates is None and self._has_room:
            self._before_updates = GeneratorStates.now(self._program.device)
        self.late = self._before_updates is None
        if self._whole is not None and not close(gradient, self._whole.gradients.get(name)):
            self.wrong.append(name)

    @property
    def generators(self) -> GeneratorStates:
        """Return the generators' state before the first update: an optimizer may draw random numbers too."""
        return self._before_updates or GeneratorStates.now(self._program.device)
