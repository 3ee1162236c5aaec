"""Answers when the user's code reads numbers off tensors while it is traced: `.item()`, `float()`, `if x > 0`.

Their values are not known. If nothing of the step depends on them (they end in a metric), any value will do: the step
is traced several times with very different values, and is the same step each time. Otherwise it cannot be planned.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch._ops import OpOverload

from stowage.stages.ir.errors import TraceError
from stowage.stages.trace.explain import reads_a_value
from stowage.stages.trace.recording.marking import Marker

MOST = 10_000
"""The most numbers that may be read: a loop that waits for one to change would not end."""

_FLOATS = (0.3712890625, 1e30, -1e30)
_INTEGERS = (7, 1_000_003, -1_000_003)
ROUNDS = len(_FLOATS)
"""The number of traces of a step in which numbers are read.

In the last one truth values are inverted, unless the user's code raises then.
"""


@dataclass
class Readings:
    """The numbers and truth values that one trace reads.

    Attributes:
        round: which of the very different values stand for the numbers.
        decisions: truth values that are read, in order, where they are not all true.
        insisted: positions of truth values that are never inverted, because the user's code raises then.
        numbers: tensors whose value was read, copied at that moment, with the answer that was given.
        truths: tensors whose truth value was read, copied at that moment, with the answer that was given.
        refusal: the error to raise if the step depends on one of them; None while nothing was read.
    """

    round: int = 0
    decisions: tuple[bool, ...] = ()
    insisted: frozenset[int] = frozenset()
    numbers: list[tuple[torch.Tensor, Any]] = field(default_factory=list)
    truths: list[tuple[torch.Tensor, bool]] = field(default_factory=list)
    refusal: TraceError | None = None

    def forget(self) -> None:
        """Forget what was read, before the step is traced once more."""
        self.numbers.clear()
        self.truths.clear()
        self.refusal = None

    def answer(self, func: OpOverload, tensor: torch.Tensor, marker: Marker) -> Any:
        """Return what stands for the value of a tensor."""
        if self.refusal is None:
            self.refusal = reads_a_value(func, marker)
        count = len(self.numbers) + len(self.truths)
        if count >= MOST:
            raise self.refusal
        if func is not torch.ops.aten._local_scalar_dense.default:
            return self.round < ROUNDS - 1
        if tensor.dtype == torch.bool:
            usual = self.decisions[len(self.truths)] if len(self.truths) < len(self.decisions) else True
            truth = usual if self.round < ROUNDS - 1 or len(self.truths) in self.insisted else not usual
            self.truths.append((tensor, truth))
            return truth
        # Each number differs from the others by more than rounding, so that it is recognized where it ends up.
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            number: Any = _FLOATS[self.round] * (1 + count / 1024)
        else:
            number = _INTEGERS[self.round] + (count if self.round < 2 else -count)
        self.numbers.append((tensor, number))
        return complex(number, 0.25) if tensor.dtype.is_complex else number
