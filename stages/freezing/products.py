"""Finds for which units the weight of a product trains, whose kernels PyTorch chooses by that."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from stowage.stages.ir.collectives import GATHER
from stowage.stages.ir.trace import TraceTables
from stowage.stages.ir.units import ALWAYS, Unit, bits_of

PRODUCTS = frozenset({"stowage.matmul.default", "stowage.matmul_input_gradient.default"})
"""Operators whose second argument is the weight, and whose last says whether it trains."""


def trained_guards(trace: TraceTables, units: Sequence[Unit]) -> Mapping[int, int]:
    """Return the guard of the weight of each product, by call."""
    of = bits_of(units)
    found = {}
    for call in trace.calls:
        if call.target in PRODUCTS:
            weight = json.loads(call.arguments)["args"][1]["value"]
            found[call.call] = of.get(_parameter(trace, weight), ALWAYS)
    return found


def _parameter(trace: TraceTables, value: int) -> str:
    """Return the name of the parameter that a value is a view of, or a copy in another type."""
    row = trace.values[value]
    while row.call >= 0:
        call = trace.calls[row.call]
        before = call.reads[call.returns.index(row.value)] if call.target == GATHER else call.reads[0]
        row = trace.values[before]
    return row.source.partition(":")[2]
