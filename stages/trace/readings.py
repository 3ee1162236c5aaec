"""Numbers that the user's code reads off tensors while it is traced: `.item()`, `float()`, `if x > 0`.

Their values are not known. Where nothing of the step depends on them (they end in a metric), any will do: the step is
traced several times with values far apart, and is the same step each time. Else it cannot be planned.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

import torch
from torch import fx
from torch._ops import OpOverload

from stowage.stages.ir.errors import TraceError
from stowage.stages.trace.explain import reads_a_value
from stowage.stages.trace.marking import Marker

Tables = TypeVar("Tables")

ROUNDS = 3
"""Traces of a step in which numbers are read."""

MOST = 10_000
"""Numbers that may be read: a loop that waits for one to change would not end."""

_FLOATS = (0.3712890625, 1e30, -1e30)
_INTEGERS = (7, 1_000_003, -1_000_003)


@dataclass
class Readings:
    """Of one trace.

    Attributes:
        round: which of `ROUNDS` values stand for the numbers.
        nodes: whose value was read, in order; the answers given.
        refusal: what to say where the step depends on a number.
    """

    round: int = 0
    nodes: list[tuple[fx.Node, Any]] = field(default_factory=list)
    refusal: TraceError | None = None

    def answer(self, func: OpOverload, node: fx.Node, marker: Marker) -> Any:
        """What stands for the number."""
        if self.refusal is None:
            self.refusal = reads_a_value(func, marker)
        count = len(self.nodes)
        if count >= MOST:
            raise self.refusal
        value = node.meta["val"]
        # Told apart by a part that every float of this size keeps, so that a number is known again where it ends.
        if func is not torch.ops.aten._local_scalar_dense.default or value.dtype == torch.bool:
            result: Any = self.round % 2 == 0
        elif value.dtype.is_floating_point:
            result = _FLOATS[self.round] * (1 + count / 1024)
        elif value.dtype.is_complex:
            result = complex(_FLOATS[self.round] * (1 + count / 1024), 0.25)
        else:
            result = _INTEGERS[self.round] + (count if self.round < 2 else -count)
        self.nodes.append((node, result))
        return result


def traced_alike(trace: Callable[[Readings], Tables]) -> Tables:
    """What `trace` gives, which must be the same whatever the numbers are that it reads off tensors.

    Raises:
        TraceError: it is not.
    """
    readings = Readings()
    first = trace(readings)
    if readings.refusal is None:
        return first
    for round_ in range(1, ROUNDS):
        again = Readings(round_)
        try:
            other = trace(again)
        except Exception as error:
            raise readings.refusal from error
        if not _alike(first, other):
            raise readings.refusal
    return first


def _alike(one: Any, other: Any) -> bool:
    names = ("storages", "values", "calls", "gradients", "constants")
    return all(getattr(one, f.name) == getattr(other, f.name) for f in fields(one) if f.name in names)
