"""Computes losses and gradients with values for backward in fewer bits, as a plan with leave at some limit does.

Gradients of a plan are those of the trace that it rewrote, bit for bit (`tests/api/test_lossy_steps.py`), so that
accuracy needs no plan. Of all choices within the limit the one is taken that spares most bytes, the hardest for
accuracy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from stowage.stages.ir.code import code_hash
from stowage.stages.ir.costs import Cost
from stowage.stages.ir.lossy import Lossy
from stowage.stages.ir.variant import PLAIN
from stowage.stages.rewrite import rewritten
from stowage.stages.rewrite.lossy import choices, described
from stowage.stages.sensitivity import StepTensors, gradient_errors, run_trace
from stowage.stages.trace import trace_step

MAKERS = ("stowage.stages.ir.lossy", "stowage.stages.rewrite.lossy", "stowage.stages.sensitivity")
"""Packages whose code decides what is kept in codes, which codes these are, and what is predicted of their error."""


def made_by() -> str:
    """Return a hash of the code that decides it: what was trained with other codes is trained anew."""
    return code_hash(*MAKERS, words=False)


@dataclass(frozen=True)
class Choice:
    """What is kept in fewer bits.

    Attributes:
        variant: the name of the rewrites.
        kept: kind and class of each.
        predicted_error: the most that the gradient may change by, as it was measured.
    """

    variant: str
    kept: tuple[str, ...]
    predicted_error: float


def chosen_codes(model: nn.Module, batches: Sequence[Any], lossy: Lossy) -> Choice:
    """Measure what each kind does to the gradient on some batches, and choose within the limit."""
    trace = trace_step(model, batches[0])
    errors = gradient_errors(trace, lossy.kinds, [StepTensors.of(model, batch) for batch in batches])
    alike = {c.signature: Cost(c.signature, "", 1e-6, 0, 0, 0, "roofline") for c in trace.calls}
    variant = next(iter(choices(trace, alike, errors, lossy)), PLAIN)
    return Choice(variant, *described(trace, variant, errors))


class CodedStep:
    """Runs forward and backward of one model with values in codes."""

    def __init__(self, model: nn.Module, batch: Any, variant: str) -> None:
        """Record the step, and rewrite it as a variant."""
        self._model = model
        self._packed = rewritten(trace_step(model, batch), variant)

    def run(self, batch: Any) -> torch.Tensor:
        """Return the loss of a batch, and leave the gradients in `.grad` of what requires them."""
        loss, gradients = run_trace(self._packed, StepTensors.of(self._model, batch))
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad and name in gradients:
                parameter.grad = gradients[name]
        return loss
