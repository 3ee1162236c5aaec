"""Decides which sums are written over a summand.

`c = add(a, b)` takes the memory of `a` (or `b`) where the plan frees that right afterwards: `c = add_(a, b)`. Addition
commutes, so every bit stays; eager's engine adds up gradients in the same way. The plan decides whether a summand dies
there, so the referee, codegen, profiling and the prediction of peaks all ask this module.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from stowage.stages.ir.graph import ComputeNode
from stowage.stages.ir.trace import Call, TraceTables

SUM, SUM_IN_PLACE = "aten.add.Tensor", "aten.add_.Tensor"


def taken_memory(
    nodes: Sequence[ComputeNode], rows: Iterable[tuple[int, int]], moved: Collection[int]
) -> dict[int, int]:
    """Return, for each row that is written over a summand, the storage whose memory it takes.

    Args:
        nodes: the program's nodes.
        rows: the node that each row of the plan computes on the device and the storage it frees, or -1.
        moved: storages that are offloaded for a time; a copy may still be reading them.
    """
    found: dict[int, int] = {}
    latest, takes = -1, list[int]()
    for number, (node, freed) in enumerate(rows):
        if node >= 0:
            latest, takes = number, [s for s in nodes[node].takes if s not in moved]
        elif freed in takes:
            found[latest] = min(freed, found.get(latest, freed), key=takes.index)
        elif freed < 0:
            takes = []
    return found


def takes_of(calls: Sequence[Call], trace: TraceTables) -> tuple[int, ...]:
    """Return the temporary storages of which the result of a node's calls may take one.

    Only a sum takes one, and only of a summand that fills its storage in the same layout as the sum fills its own.
    Where layouts depend on what trains only the first will do, as whose sums lie.
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
        for v in ((first,) if trace.lies_by_training else (first, second))
        if trace.storages[v.storage].role == "temporary"
        and trace.storages[v.storage].nbytes == room
        and (v.dtype, v.shape, v.stride, v.offset) == (result.dtype, result.shape, result.stride, result.offset)
    )


def written_over(call: Call, storage: int, trace: TraceTables) -> Call:
    """Return the sum, written over its summand in `storage`, which is one of `takes_of`."""
    over = next(v for v in call.reads if trace.values[v].storage == storage)
    other = next(v for v in call.reads if v != over)
    arguments = json.dumps({"args": [{"value": over}, {"value": other}], "kwargs": {}})
    return replace(call, target=SUM_IN_PLACE, arguments=arguments)
