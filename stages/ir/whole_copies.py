"""Finds copies that put a whole value back over what was unpacked of it, in steps in which something trains.

A kernel of backward may read a value that is kept in codes where a parameter is frozen, and as it is where it trains.
Backward then makes the value of its codes, and copies the whole value over it if the parameter trains:

    again = unpack(codes)
    again.copy_(x)           left out in steps in which the parameter is frozen, and then x is not needed
    dx, dw = kernel(again)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from stowage.stages.ir.collectives import SCATTER, scattered
from stowage.stages.ir.trace import AGAIN, Call, Gradient, Storage, Value

UNLESS_FROZEN = ".unless_frozen"
"""End, before `AGAIN`, of the names of storages over which a whole value is copied unless something is frozen."""

COPY = "aten.copy_.default"

DECIDING = {"aten.native_layer_norm_backward.default": 1}
"""Kernels that may read such a storage, each with the result for which it needs the whole value."""


class Recorded(Protocol):
    """The tables of a step that are read here."""

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


@dataclass(frozen=True)
class WholeCopy:
    """A copy of a whole value over what was unpacked of it.

    Attributes:
        source: the storage of the whole value.
        parameters: those for whose gradients the whole value is read; without one of them the copy is left out.
    """

    source: int
    parameters: frozenset[str]


def whole_copies(trace: Recorded) -> Mapping[int, WholeCopy]:
    """Return the copies of a step, by their calls."""
    over = {s.storage for s in trace.storages if s.name.endswith(UNLESS_FROZEN + AGAIN)}
    if not over:
        return {}
    source: dict[int, tuple[int, int]] = {}
    decided_by: dict[int, set[int]] = defaultdict(set)
    for call in trace.calls:
        if call.target == COPY and over.intersection(call.mutates):
            source[call.call] = call.mutates[0], trace.values[call.reads[1]].storage
        elif call.target in DECIDING:
            for storage in over.intersection(trace.values[v].storage for v in call.reads):
                decided_by[storage].add(call.returns[DECIDING[call.target]])
    trained = gradients_from(trace, {v for values in decided_by.values() for v in values})
    return {
        call: WholeCopy(whole, frozenset().union(*(trained[v] for v in decided_by[storage])))
        for call, (storage, whole) in source.items()
    }


def gradients_from(trace: Recorded, values: set[int]) -> Mapping[int, frozenset[str]]:
    """Return for each of some values of backward the parameters whose gradients it is, or is a part of."""
    part_of: dict[int, set[int]] = {v: {v} for v in values}
    names: dict[int, set[str]] = {v: set() for v in values}
    for call in trace.calls if values else ():
        found = {each for v in call.reads for each in part_of.get(v, ())}
        if not found:
            continue
        for name, value in scattered(call.arguments).items() if call.target == SCATTER else ():
            for each in part_of.get(value, ()):
                names[each].add(name)
        for value in call.returns if call.phase != "update" else ():
            if value >= 0:
                part_of.setdefault(value, set()).update(found)
    for gradient in trace.gradients:
        for value in part_of.get(gradient.gradient_value, ()):
            names[value].add(gradient.parameter)
    return {v: frozenset(found) for v, found in names.items()}
