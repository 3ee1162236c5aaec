"""The loss that a training step returns: calling its `backward` says that the step has run it already."""

from __future__ import annotations

from typing import Any

import torch

from stowage.stages.ir.errors import ParameterError

_DONE = (
    "This loss comes from a planned training step, which has run backward already, and the update if it has an "
    "optimizer: leave out loss.backward(), optimizer.step() and zero_grad()."
)


class StepLoss(torch.Tensor):
    """A tensor like any other, without a graph behind it."""

    @staticmethod
    def of(loss: torch.Tensor) -> torch.Tensor:
        """Return the loss as a `StepLoss` in the same memory, without a graph."""
        return loss.detach().as_subclass(StepLoss)

    def backward(self, *arguments: Any, **keywords: Any) -> None:
        """Run backward of what was computed from this loss; refuse where the planned step has done it already.

        Raises:
            ParameterError: nothing that requires gradients has been added to it since.
        """
        if not self.requires_grad:
            raise ParameterError(_DONE)
        self.as_subclass(torch.Tensor).backward(*arguments, **keywords)  # type: ignore[no-untyped-call]

    def __repr__(self, **how: Any) -> Any:  # type: ignore[override]
        return torch.Tensor.__repr__(self.as_subclass(torch.Tensor), **how)  # type: ignore[no-untyped-call]

    def __format__(self, specification: str) -> str:
        return self.as_subclass(torch.Tensor).__format__(specification)  # type: ignore[no-any-return,no-untyped-call]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Save as a plain tensor."""
        return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return self.as_subclass(torch.Tensor).__deepcopy__(memo)  # type: ignore[no-any-return,no-untyped-call]
