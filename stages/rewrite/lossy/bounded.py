"""Tells which values have no element outside of [0, 1], whatever the batch and the weights are."""

from __future__ import annotations

from stowage.stages.ir.trace import TraceTables, base_values
from stowage.stages.rewrite.lossy.saved import Saved

_UNIT = frozenset(f"aten.{name}.default" for name in ("_safe_softmax", "_softmax", "hardsigmoid", "sigmoid"))
"""Operators whose results have elements of 0 to 1 alone."""

_COPIES = frozenset({"aten._to_copy.default", "aten.clone.default"})
"""Operators that return what they read, in another type or order."""


def within_unit(trace: TraceTables, saved: Saved) -> bool:
    """Say whether every element of a value is in [0, 1]: softmax or a sigmoid made it, and nothing writes into it.

    What dropout returns is not: it divides by the share that it keeps.
    """
    value, bases = saved.base, base_values(trace)
    written = {s for call in trace.calls if not call.is_view for s in call.mutates}
    while trace.values[value].call >= 0 and trace.values[value].storage not in written:
        maker = trace.calls[trace.values[value].call]
        if maker.target not in _COPIES:
            return maker.target in _UNIT
        value = bases[trace.values[maker.reads[0]].storage]
    return False
