"""Estimates calls that were not measured from measured calls of the same operator in other sizes.

A call's *kind* is what does not change with the length of a batch: operator, types, how dimensions lie in memory, and
arguments but for sizes. Its *sizes* are all the numbers that may change. Bytes grow with them: a call needs no more
workspace than the most that measured ones of its kind needed, if one of them is at least as large in every size.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from stowage.stages.ir.costs import Cost
from stowage.stages.ir.trace import Call, TraceTables, Value
from stowage.stages.ir.updates import CLIP, UPDATE, UPDATE_ALL
from stowage.stages.kernels import known_outputs

SMALLEST_SIZE = 8
"""A smaller number among the arguments may be a dimension, a stride or a flag, so it belongs to the kind."""

_WIDTHS = {"64": 8, "32": 4, "16": 2, "128": 16}


@dataclass(frozen=True)
class _Point:
    """A call whose cost is known.

    Attributes:
        sizes: the numbers that may change with the batch.
        touched_bytes: bytes of what it reads and returns.
        as_traced: whether PyTorch's fake kernel is right about its results.
        cost: its cost.
    """

    sizes: tuple[int, ...]
    touched_bytes: int
    as_traced: bool
    cost: Cost


_ENDING = (UPDATE, UPDATE_ALL, CLIP)


class Similar:
    """Knows calls whose costs are known, by kind."""

    def __init__(self) -> None:
        self._points: dict[str, dict[tuple[int, ...], _Point]] = {}

    def learn(self, trace: TraceTables, costs: Mapping[str, Cost]) -> None:
        """Learn calls of the trace that were measured, or at least their memory."""
        seen: set[str] = set()
        for call in trace.calls:
            cost = costs.get(call.signature)
            if cost is None or cost.source == "roofline" or call.signature in seen or call.target in _ENDING:
                continue
            seen.add(call.signature)
            kind, sizes = _described(call, trace)
            known = self._points.setdefault(kind, {})
            if sizes not in known or cost.source == "measured":
                as_traced = call.signature not in known_outputs().measured
                known[sizes] = _Point(sizes, _touched_bytes(call, trace), as_traced, cost)

    def workspace_bytes(self, call: Call, trace: TraceTables) -> tuple[int, tuple[int, ...]] | None:
        """Return the bytes of workspace that the call needs at most, also by flag; None if it must run to be known.

        That is so where no known call of its kind is as large, or where PyTorch's fake kernels were wrong about one.
        """
        kind, sizes = _described(call, trace)
        known = self._points.get(kind, {}).values()
        larger = (p for p in known if all(a <= b for a, b in zip(sizes, p.sizes, strict=True)))
        if not any(larger) or not all(point.as_traced for point in known):
            return None
        costs = [point.cost for point in known]
        by_flag = zip(*(cost.flagged_bytes for cost in costs))  # none where one could not be tried
        return max(cost.workspace_bytes for cost in costs), tuple(map(max, by_flag))

    def time_s(self, call: Call, trace: TraceTables) -> float | None:
        """Return a time between those of the nearest measured calls of its kind, by the bytes that they touch.

        Beyond the nearest ones it is proportional. None where no call of the kind was timed.
        """
        kind, _ = _described(call, trace)
        found: dict[int, float] = {}
        for point in self._points.get(kind, {}).values():
            if point.cost.source == "measured":
                found[point.touched_bytes] = max(point.cost.time_s, found.get(point.touched_bytes, 0.0))
        return _between(sorted(found.items()), _touched_bytes(call, trace)) if found else None


def _between(points: list[tuple[int, float]], at: int) -> float:
    position = bisect_left(points, (at, -math.inf))
    if position < len(points) and points[position][0] == at:
        return points[position][1]
    if position == 0 or position == len(points):
        (nbytes, time_s) = points[0] if position == 0 else points[-1]
        return time_s * at / nbytes if nbytes else time_s
    (below, before_s), (above, after_s) = points[position - 1], points[position]
    return before_s + (after_s - before_s) * (at - below) / (above - below)


def _described(call: Call, trace: TraceTables) -> tuple[str, tuple[int, ...]]:
    """Return kind and sizes of a call."""
    sizes: list[int] = []

    def walk(item: Any) -> Any:
        if isinstance(item, dict):
            ((key, content),) = item.items()
            return [_lies(trace.values[content], sizes)] if key == "value" else item
        if isinstance(item, list):
            return [walk(element) for element in item]
        if isinstance(item, int) and not isinstance(item, bool) and item >= SMALLEST_SIZE:
            sizes.append(item)
            return {"size": 0}
        return item

    raw = json.loads(call.arguments)
    kind = [walk(raw["args"]), {name: walk(a) for name, a in raw["kwargs"].items()}]
    returned = [_lies(trace.values[v], sizes) if v >= 0 else "" for v in call.returns]
    return json.dumps([call.target, kind, returned]), tuple(sizes)


def _lies(value: Value, sizes: list[int]) -> str:
    """Describe type and layout: which dimension is innermost, which repeat, which are 1, and whether there are gaps."""
    sizes.extend(value.shape)
    order = sorted(range(len(value.shape)), key=lambda d: (-value.stride[d], d))
    step, gaps = 1, False
    for d in reversed(order):
        if value.shape[d] != 1 and value.stride[d]:
            gaps = gaps or value.stride[d] != step
            step = value.stride[d] * value.shape[d]
    alike = "".join("1" if n == 1 else "r" if not s else "." for n, s in zip(value.shape, value.stride, strict=True))
    moved = [d for d in order if value.shape[d] != 1 and value.stride[d]]
    return f"{value.dtype} {alike} {moved} {'gaps' if gaps else ''}"


def _touched_bytes(call: Call, trace: TraceTables) -> int:
    values: Iterable[int] = {*call.reads, *(v for v in call.returns if v >= 0)}
    return sum(math.prod(trace.values[v].shape) * _width(trace.values[v].dtype) for v in values)


def made_bytes(call: Call, trace: TraceTables) -> int:
    """Return the bytes of storages that a call makes, as its trace has them."""
    returned = {trace.values[v].storage for v in call.returns if v >= 0}
    return sum(trace.storages[s].nbytes for s in returned - {trace.values[v].storage for v in call.reads})


def _width(dtype: str) -> int:
    return next((width for bits, width in _WIDTHS.items() if dtype.endswith(bits)), 1)
