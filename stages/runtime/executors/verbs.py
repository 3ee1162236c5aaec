"""Defines what a generated step sees: the tensors that it reads by name, and the verbs that it calls.

Generated code names this type alone, so the same step runs under any executor. `runtime/whitelist.py` takes from here
what a step may call, so a new verb is added in this file and in the executors that have it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from types import EllipsisType
from typing import Any, Protocol

import torch

from stowage.stages.runtime.random.randomness import RandomStates

Form = tuple[Sequence[int], Sequence[int], int]
"""Shape, strides and offset of a view, in elements."""


class Iteration(Protocol):
    """The surroundings of one run of a generated step.

    Attributes:
        parameter, buffer, input, constant: persistent tensors by name.
        outside: tensors that belong neither to the model nor to the batch, as they are now.
        gradient: gradients that wait in `.grad`, by their parameters' names.
        number: numbers that may differ from call to call, by name.
        random: the random states of nodes that run again; see `RandomStates`.
        grad_norm: the global norm of all gradients before clipping; None where nothing was clipped.
        left: the tensors that the step leaves in the user's objects.
    """

    parameter: Mapping[str, torch.Tensor]
    buffer: Mapping[str, torch.Tensor]
    input: Mapping[str, torch.Tensor]
    constant: Mapping[str, torch.Tensor]
    outside: Mapping[str, torch.Tensor]
    gradient: Mapping[str, torch.Tensor]
    number: Mapping[str, Any]
    random: RandomStates
    grad_norm: torch.Tensor | None
    left: Sequence[torch.Tensor]

    def begin(self, label: str) -> None:
        """Begin a step of the cycle."""

    def active(self, *names: str | EllipsisType) -> bool:
        """Return whether one of some units trains in this run; `...` stands for all units between two names."""

    def as_in_forward(self) -> AbstractContextManager[None]:
        """Run kernels that look at the gradient mode with it on, as in a plain forward, yet record nothing."""

    def leave(self, tensors: Sequence[torch.Tensor]) -> None:
        """Hand out what forward and loss leave in the user's objects."""

    def clip(self, norms: Sequence[torch.Tensor | None], max_norm: float) -> torch.Tensor:
        """Return the factor that clips gradients by their global norm, of those that there are; remember the norm."""

    def update(self, name: str, gradient: torch.Tensor, scale: torch.Tensor | None = None) -> None:
        """Update one parameter now; its gradient is complete. A scale clips the gradient first."""

    def update_together(self, gradients: Mapping[str, torch.Tensor], scale: torch.Tensor | None = None) -> None:
        """Update some parameters by one step of the optimizer that knows no others. A scale clips the gradients."""

    def update_all(self, gradients: Mapping[str, torch.Tensor | None], scale: torch.Tensor | None = None) -> None:
        """Run one step of the optimizer for all parameters that train; every gradient is complete.

        A scale clips them first.
        """

    def offload(self, name: str, activation: torch.Tensor | None = None) -> None:
        """Start copying a parameter, a state or an activation to the lower tier."""

    def reload(self, name: str) -> None:
        """Start copying to the device, into memory that is taken now."""

    def wait(self, name: str) -> torch.Tensor | None:
        """Wait for the copy or update of `name`, and return an activation that was reloaded."""

    def free(self, name: str) -> None:
        """Drop the device's copy of a parameter or state."""

    def update_on_cpu(self, name: str, gradient: str, scale: str | None = None, *, form: Form | None = None) -> None:
        """Start the update of a parameter by the CPU, on the weight, the states and the gradient in the lower tier.

        Args:
            name: the parameter's name.
            gradient: the name of the gradient's slot.
            scale: the name of the slot of the factor that clips the gradient first.
            form: shape, strides and offset of a gradient that is a view of what was offloaded.
        """

    def gather(self, key: str, names: Sequence[str]) -> None:
        """Start the gather of some parameters' whole weights from all ranks, to be waited for under `key`."""

    def gathered(self, key: str) -> Sequence[torch.Tensor]:
        """Wait for the gather of that key, and return the whole weights."""

    def scatter(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Start averaging the gradients of some parameters over all ranks, of which each keeps its shards."""

    def scattered(self, key: str) -> Sequence[torch.Tensor]:
        """Wait for the scatter whose first parameter is `key`, and return this rank's shards of the means."""

    def changed(self, name: str) -> None:
        """Mark the copy of `name` in the lower tier as out of date, because the content on the device has changed."""

    def keep_offloaded(self, name: str) -> None:
        """Put a stand-in into `.grad` for a gradient that has just been offloaded."""

    def keep(self, name: str, gradient: torch.Tensor, scale: torch.Tensor | None = None) -> None:
        """Leave a gradient in `.grad`, added to what is there, as `loss.backward()` does. A scale clips it first."""


AROUND = frozenset({"as_in_forward"})
"""Verbs that surround other lines, in a `with` statement."""

CONDITIONS = frozenset({"active"})
"""Verbs that answer yes or no, in an `if` statement or as a flag of a kernel."""

VERBS = frozenset(name for name in vars(Iteration) if not name.startswith("_")) - AROUND - CONDITIONS
"""Verbs that are lines of their own."""
