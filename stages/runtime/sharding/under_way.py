"""Keeps the collectives that a step has started and not yet waited for, and refuses steps that mix up their order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from stowage.stages.ir.errors import PlanMismatchError


class Started(Protocol):
    """A collective under way."""

    def finish(self) -> list[torch.Tensor]:
        """Wait, and return what it makes."""


class UnderWay:
    """The collectives of one run of a step, by what they are."""

    def __init__(self) -> None:
        self._found: dict[str, Started] = {}

    def add(self, name: str, start: Callable[[], Started]) -> None:
        """Start a collective.

        Raises:
            PlanMismatchError: the same one is under way.
        """
        if name in self._found:
            raise PlanMismatchError(f"The plan starts the {name} again before it has waited for it.")
        self._found[name] = start()

    def pop(self, name: str) -> Started:
        """Return a collective, which is going to be waited for.

        Raises:
            PlanMismatchError: there is none of this name.
        """
        if name not in self._found:
            raise PlanMismatchError(f"The plan waits for the {name}, which it has not started.")
        return self._found.pop(name)

    def clear(self) -> None:
        """Forget what a run that failed has left."""
        self._found.clear()

    def check_over(self) -> None:
        """Return if nothing is under way.

        Raises:
            PlanMismatchError: a step has ended that has not waited for a collective.
        """
        if self._found:
            names = ", ".join(f"the {name}" for name in self._found)
            raise PlanMismatchError(f"The plan starts {names} and never waits for it: nothing may read what it gives.")
