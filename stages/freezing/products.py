"""Finds for which units the weight of a product trains, whose kernels PyTorch chooses by that."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

from stowage.stages.ir.collectives import GATHER
from stowage.stages.ir.trace import TraceTables
from stowage.stages.ir.units import ALWAYS, Unit, bits_of, joined

PRODUCTS = frozenset({"stowage.matmul.default", "stowage.matmul_input_gradient.default"})
"""Operators whose second argument is the weight, and whose last says whether it trains."""


def trained_guards(trace: TraceTables, units: Sequence[Unit]) -> Mapping[int, int]:
    """Return the guard of the weight of each product, by call."""
    of = bits_of(units)
    trained = {g.parameter for g in trace.gradients if g.gradient_value >= 0}
    found = {}
    for call in trace.calls:
        if call.target in PRODUCTS:
            weight = json.loads(call.arguments)["args"][1]["value"]
            names = trained.intersection(_parameters(trace, weight))
            found[call.call] = joined(*(of.get(name, ALWAYS) for name in names)) or ALWAYS
    return found


def _parameters(trace: TraceTables, value: int) -> Iterator[str]:
    """Yield the names of what a value is computed from; it is a view or a function of one parameter that trains."""
    row = trace.values[value]
    if row.call < 0:
        yield row.source.partition(":")[2]
        return
    call = trace.calls[row.call]
    reads = [call.reads[call.returns.index(value)]] if call.target == GATHER else call.reads
    for read in reads:
        yield from _parameters(trace, read)
