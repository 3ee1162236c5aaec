"""Finds for which units the operators train whose kernels PyTorch chooses by what trains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from operator import or_

from stowage.stages.ir.by_training import BY_TRAINING, deciders_of
from stowage.stages.ir.collectives import GATHER
from stowage.stages.ir.trace import TraceTables
from stowage.stages.ir.units import ALWAYS, Unit, bits_of


def trained_guards(trace: TraceTables, units: Sequence[Unit]) -> Mapping[int, int]:
    """Return the guard of the parameters that decide in each call of such an operator."""
    of = bits_of(units)
    found = {}
    for call in trace.calls:
        if call.target in BY_TRAINING:
            guards = [of.get(_parameter(trace, value), ALWAYS) for value in deciders_of(call.arguments)]
            found[call.call] = reduce(or_, guards)
    return found


def _parameter(trace: TraceTables, value: int) -> str:
    """Return the name of the parameter that a value is a view of, or a copy in another type."""
    row = trace.values[value]
    while row.call >= 0:
        call = trace.calls[row.call]
        before = call.reads[call.returns.index(row.value)] if call.target == GATHER else call.reads[0]
        row = trace.values[before]
    return row.source.partition(":")[2]
