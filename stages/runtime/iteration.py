"""What generated code sees: tensors by name, updates, gradients, random states."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from stowage.stages.runtime.randomness import RandomStates


class Iteration:
    """The surroundings of one generated step.

    Attributes:
        parameter, buffer, input, constant: persistent tensors by name.
        random: see `RandomStates`.
    """

    def __init__(
        self,
        *,
        parameter: Mapping[str, torch.Tensor],
        buffer: Mapping[str, torch.Tensor],
        input: Mapping[str, torch.Tensor],
        constant: Mapping[str, torch.Tensor],
        random: RandomStates,
        update: Callable[[str, torch.Tensor], None],
    ) -> None:
        self.parameter = parameter
        self.buffer = buffer
        self.input = input
        self.constant = constant
        self.random = random
        self._update = update

    @contextmanager
    def as_in_forward(self) -> Iterator[None]:
        """For kernels that look at the gradient mode themselves: enabled, as eager's forward has it, yet unrecorded."""
        with torch.enable_grad(), torch._C._AutoDispatchBelowAutograd():
            yield

    def update(self, name: str, gradient: torch.Tensor) -> None:
        """Update one parameter now; its gradient is complete."""
        self._update(name, gradient)

    def keep(self, name: str, gradient: torch.Tensor) -> None:
        """Leave a gradient in `.grad`, added to what is there, as `loss.backward()` does."""
        parameter = self.parameter[name]
        if parameter.grad is None:
            parameter.grad = gradient
        else:
            parameter.grad.add_(gradient)
