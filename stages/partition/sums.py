"""Sums that may be written over a summand, see `ir.sums`."""

from __future__ import annotations

import json
from collections.abc import Sequence

from stowage.stages.ir.sums import SUM
from stowage.stages.ir.trace import Call, TraceTables


def takes_of(calls: Sequence[Call], trace: TraceTables) -> tuple[int, ...]:
    """Of a node's calls: temporary storages of which its result may take one.

    That is of a sum alone, and summands that fill their storages in the same layout as the sum fills its own.
    """
    if len(calls) != 1 or calls[0].target != SUM or len(calls[0].reads) != 2:
        return ()
    call = calls[0]
    if json.loads(call.arguments) != {"args": [{"value": v} for v in call.reads], "kwargs": {}}:
        return ()
    first, second = (trace.values[v] for v in call.reads)
    if first.storage == second.storage or first.dtype != second.dtype:
        return ()
    result = trace.values[call.returns[0]]
    room = trace.storages[result.storage].nbytes
    return tuple(
        v.storage
        for v in (first, second)
        if trace.storages[v.storage].role == "temporary"
        and trace.storages[v.storage].nbytes == room
        and (v.dtype, v.shape, v.stride, v.offset) == (result.dtype, result.shape, result.stride, result.offset)
    )
