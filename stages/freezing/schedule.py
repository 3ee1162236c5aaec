"""Follows a training that freezes: asks the policy what trains in each step, and keeps how much units moved."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from typing import Any

from stowage.stages.freezing.dynamics import Dynamics
from stowage.stages.freezing.policies import Policy
from stowage.stages.ir.errors import ParameterError, PlanMismatchError
from stowage.stages.ir.freezable import Freezable

Decide = Callable[[Callable[[], frozenset[str]]], frozenset[str]]
"""Returns what a function chooses: of several ranks what it chooses on the first, on all."""


def alone(choose: Callable[[], frozenset[str]]) -> frozenset[str]:
    """Decide for a process alone."""
    return choose()


class Schedule:
    """Chooses what trains, step by step.

    Attributes:
        freezable: the units, and how many of them may train at once.
        policy: chooses.
        dynamics: how much each unit moved.
        step: number of steps that have ended.
    """

    def __init__(self, freezable: Freezable, policy: Policy, seed: int, decide: Decide = alone) -> None:
        self._decide = decide
        self.freezable = freezable
        self.policy = policy
        self.dynamics = Dynamics((unit.name for unit in freezable.units), seed)
        self.step = 0
        self._active: frozenset[str] | None = None

    @property
    def chosen(self) -> bool:
        """Return whether it is known what trains in the step under way."""
        return self._active is not None

    def active(self) -> frozenset[str]:
        """Return the units that train in the step under way: the same for all micro-batches of an update.

        Raises:
            ParameterError: the policy names an unknown unit, or more units than memory was planned for.
        """
        if self._active is None:
            self._active = self._decide(lambda: self._checked(self.policy.choose(self.step, self.dynamics.all())))
        return self._active

    def _checked(self, chosen: Collection[str]) -> frozenset[str]:
        who = type(self.policy).__name__
        listed = None if isinstance(chosen, str) or not isinstance(chosen, Iterable) else list(chosen)
        if listed is None or not all(isinstance(name, str) for name in listed):
            raise ParameterError(
                f"The policy {who} returned {ascii(chosen)[:60]} from choose in step {self.step}: return the names of "
                "the units that train, as a list or a set."
            )
        names, known = frozenset(listed), {unit.name for unit in self.freezable.units}
        if unknown := sorted(names - known):
            raise ParameterError(f"The policy {who} trains {unknown[0]!r}, which is no unit: take names from dynamics.")
        if len(names) > self.freezable.active:
            raise ParameterError(
                f"The policy {who} trains {len(names)} units in step {self.step}, and memory was planned for "
                f"{self.freezable.active} of {len(known)}: lower the rate, or let it choose fewer."
            )
        return names

    def ended(self, distances: Mapping[str, float]) -> None:
        """Take in that a step has updated its units, and how far they moved."""
        moved = {name: d for name, d in distances.items() if name in self.active() and not math.isnan(d)}
        self.dynamics.moved(moved)
        self.step += 1
        self._active = None

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the choices to come depend on, as JSON can hold it.

        Raises:
            ParameterError: the policy's own state is something else.
        """
        own = getattr(self.policy, "state_dict", None)
        state, who = own() if own is not None else None, type(self.policy).__name__
        try:
            json.dumps(state)
        except (TypeError, ValueError, RecursionError) as error:
            raise ParameterError(
                f"The state_dict of the policy {who} has what JSON cannot hold ({error}): return numbers, texts, lists "
                "and dictionaries by text."
            ) from error
        return {"step": self.step, "dynamics": self.dynamics.state_dict(), "policy": who, "state": state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a stored state.

        Raises:
            PlanMismatchError: it is of another policy, or of other units.
            ParameterError: the policy cannot load its own state. Nothing is changed, and the policy is what it was.
        """
        who, units = type(self.policy).__name__, {unit.name for unit in self.freezable.units}
        if state["policy"] != who:
            raise PlanMismatchError(f"The checkpoint was saved with the policy {state['policy']}, and here is {who}.")
        if set(state["dynamics"]) != units:
            raise PlanMismatchError("The checkpoint was saved with other units to freeze: give the same `freeze`.")
        step = int(state["step"])
        dynamics = {name: float(value) for name, value in state["dynamics"].items()}
        if state["state"] is not None:
            self._load_policy(state["state"])
        self.step = step
        self.dynamics.load_state_dict(dynamics)
        self._active = None

    def _load_policy(self, state: Any) -> None:
        """Let the policy go on from a stored state; where it refuses, from its own again.

        Raises:
            ParameterError: it refuses.
        """
        load = getattr(self.policy, "load_state_dict", None)
        if load is None:
            return
        save = getattr(self.policy, "state_dict", None)
        before = save() if save is not None else None
        try:
            load(state)
        except Exception as error:
            if before is not None:
                with suppress(Exception):
                    load(before)
            raise ParameterError(
                f"The policy {type(self.policy).__name__} cannot load its state of the checkpoint "
                f"({type(error).__name__}: {error}): mend its load_state_dict."
            ) from error
