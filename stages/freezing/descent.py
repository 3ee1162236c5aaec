"""Finds which parameters' gradients descend from each call of backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from stowage.stages.ir.trace import Call, Gradient, Storage, Value


class Recorded(Protocol):
    """Forward and backward of a step, as a trace has them before its updates and with them."""

    @property
    def storages(self) -> Sequence[Storage]:
        """Return the storages."""

    @property
    def values(self) -> Sequence[Value]:
        """Return the values."""

    @property
    def calls(self) -> Sequence[Call]:
        """Return the calls."""

    @property
    def gradients(self) -> Sequence[Gradient]:
        """Return the gradient of each parameter."""


def descendants(trace: Recorded) -> list[frozenset[str]]:
    """Return, for each call, the parameters whose gradients are computed from what it makes; none for updates."""
    of_value: dict[int, frozenset[str]] = {
        g.gradient_value: frozenset((g.parameter,)) for g in trace.gradients if g.gradient_value >= 0
    }
    nothing = frozenset[str]()
    of_storage: dict[int, frozenset[str]] = {}
    """What is computed from a storage after it was written in place."""
    found = [nothing] * len(trace.calls)
    for call in reversed(trace.calls):
        if call.phase == "update":
            continue
        own = nothing.union(*(of_value.get(v, nothing) for v in call.returns))
        own = own.union(*(of_storage.get(s, nothing) for s in call.mutates))
        own = own.union(*(of_storage.get(trace.values[v].storage, nothing) for v in call.returns if v >= 0))
        found[call.call] = own
        for value in call.reads if own else ():
            of_value[value] = of_value.get(value, nothing) | own
            storage = trace.values[value].storage
            of_storage[storage] = of_storage.get(storage, nothing) | own
    return found
