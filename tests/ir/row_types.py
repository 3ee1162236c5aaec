"""Every row type of the project, and Hypothesis strategies for their rows."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any

from hypothesis import strategies as st

from stowage.stages.codegen import Manifest
from stowage.stages.ir import costs, graph, hierarchy, plan, run, trace

TABLES: tuple[type, ...] = (
    trace.Storage,
    trace.Value,
    trace.Call,
    trace.Constant,
    trace.Gradient,
    costs.Cost,
    costs.Returned,
    graph.ComputeNode,
    graph.Block,
    hierarchy.Cluster,
    hierarchy.BlockCluster,
    plan.Option,
    plan.PlanRow,
    plan.Slot,
    run.StepRecord,
    run.MemorySample,
    run.TraceSpan,
)
RECORDS: tuple[type, ...] = (trace.TraceMeta, costs.DeviceDescription, plan.PlanSummary, Manifest)

_LEAVES: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(-(1 << 63), (1 << 63) - 1),
    float: st.floats(allow_nan=False),
    str: st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    bool: st.booleans(),
    bytes: st.binary(max_size=8),
}


def _of(annotation: Any) -> st.SearchStrategy[Any]:
    if annotation in _LEAVES:
        return _LEAVES[annotation]
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is tuple:
        return st.lists(_of(arguments[0]), max_size=3).map(tuple)
    if origin is typing.Literal:
        return st.sampled_from(arguments)
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*(st.none() if a is type(None) else _of(a) for a in arguments))
    raise TypeError(annotation)


_AMOUNTS = st.floats(1e-9, 1e15)
"""Of a device."""


def rows_of(row_type: type) -> st.SearchStrategy[Any]:
    """Any rows of a type."""
    hints = typing.get_type_hints(row_type)
    of = {f.name: _of(hints[f.name]) for f in dataclasses.fields(row_type)}
    if row_type is costs.DeviceDescription:
        of |= {name: _AMOUNTS for name, kind in hints.items() if kind is float}
        of |= {name: st.integers(0, 1 << 50) for name in ("library_bytes", "context_bytes", "collective_ranks")}
        of |= {"memory_bytes": st.integers(1, 1 << 50), "fingerprint": st.from_regex(r"[a-f0-9]{16}", fullmatch=True)}
    return st.builds(row_type, **of)
