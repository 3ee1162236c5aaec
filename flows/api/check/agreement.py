"""Decides whether a planned step and plain PyTorch agree, and words the error where they do not."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from stowage.stages.ir.errors import StaleStep
from stowage.stages.runtime.shadow.shadow import Number, digest
from stowage.stages.workload.outputs import OutputForm

REPEATABLE = 32
"""Roundings by which losses may differ where kernels of a GPU need not repeat their bits."""

UNSEEN = (
    "something that it reads has changed where Stowage cannot see it (a number that a library or a file holds, a "
    "global, an environment variable), so pass that in the batch, as a tensor or a number"
)
"""The usual cause of a stale plan, and the remedy."""


@dataclass
class AgreementHistory:
    """The number of calls of a program so far, and the latest call that was compared and agreed."""

    calls: int = 0
    agreed: int = 0

    @property
    def since(self) -> str:
        """Say in words since when numbers have differed."""
        if not self.agreed:
            return f"on call number {self.calls}, the first that is compared"
        return f"since some call after number {self.agreed} and at the latest this one, number {self.calls}"

    def stale_step(self, what: str, why: str = UNSEEN) -> StaleStep:
        """Make the error for a training step that did `what`."""
        return StaleStep(
            f"The planned step {what}, {self.since}: {why}; weights have been updated with the stale step, so go back "
            "to what was saved before, and the next call plans anew.",
            self.calls,
            self.agreed,
        )

    def stale_evaluation(self, position: int) -> StaleStep:
        """Make the error for an evaluation whose tensor at `position` differs."""
        return StaleStep(
            f"The planned evaluation gave another tensor number {position} of its result than plain PyTorch, "
            f"{self.since}: {UNSEEN}; the next call plans anew.",
            self.calls,
            self.agreed,
        )


def same_loss(loss: Number, plain: Number, device: torch.device) -> bool:
    """Return whether two losses are equal, or nearly so where kernels of a GPU need not repeat their bits."""
    if loss.dtype != plain.dtype:
        return False
    if loss.bits == plain.bits or repeats(device):
        return loss.bits == plain.bits
    bound = REPEATABLE * torch.finfo(loss.dtype).eps * max(abs(loss.value), abs(plain.value))
    return math.isfinite(bound) and abs(loss.value - plain.value) <= bound


def close(found: torch.Tensor, expected: torch.Tensor | None) -> bool:
    """Return whether two tensors are equal bit for bit, all NaN alike; nearly so where GPU kernels do not repeat."""
    if expected is None or found.dtype != expected.dtype or found.shape != expected.shape:
        return False
    here = found.detach().cpu()
    if torch.equal(here, expected) or not here.dtype.is_floating_point:
        return torch.equal(here, expected)
    if repeats(found.device):
        return bool(((here == expected) | (here.isnan() & expected.isnan())).all())
    bound = REPEATABLE * torch.finfo(here.dtype).eps
    return torch.allclose(here, expected, bound, bound * float(expected.abs().max()), equal_nan=True)


def digests(result: Any) -> list[tuple[torch.dtype, torch.Size, bytes]]:
    """Return dtype, shape and digest of each tensor of a result."""
    return [(t.dtype, t.shape, digest(t)) for t in OutputForm.of(result)[1]]


def repeats(device: torch.device) -> bool:
    """Return whether kernels on a device repeat their bits."""
    return device.type == "cpu" or torch.are_deterministic_algorithms_enabled()
