"""Keeps the names of tensors in a step: fetches, views and renames right before a tensor is read, and deletes."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from stowage.stages.ir.arguments import render_arguments, split_receiver
from stowage.stages.ir.operators import ALIKE, FUNCTIONS, METHODS, SPREAD
from stowage.stages.ir.results import grouped
from stowage.stages.ir.source import identifier, operator_name, quoted, role_of
from stowage.stages.ir.trace import Call, TraceTables, base_values

NOTHING = "_"
"""Name of results that a step ignores."""
VIEW = "aten.view.default"
NEUTRAL = frozenset({VIEW, "aten.expand.default", "aten.slice.Tensor", "aten.detach.default", "aten.alias.default"})
"""Operators whose result shows the numbers of their first argument as they are (unlike a conjugate)."""


class Identifiers:
    """The lines of a step so far, and which tensors have a name in them.

    Attributes:
        lines: lines without indentation; a row's action adds to them.
        defined: values that have a name now.
        base_of: storage -> the first value in it.
    """

    def __init__(self, trace: TraceTables) -> None:
        self._trace = trace
        self.lines: list[str] = []
        self.defined: set[int] = set()
        self.base_of = base_values(trace)
        self._same_as: dict[int, int] = {}
        """Views that show what another value shows, in the same form."""
        self._of_storage: dict[int, list[int]] = defaultdict(list)
        self._call_of = {v: c for c in trace.calls for v in c.returns if v >= 0}

    def name(self, value: int) -> str:
        """Return the name of a value in the text."""
        while value in self._same_as:
            value = self._same_as[value]
        return identifier(self._trace.values[value].name)

    def define(self, value: int) -> None:
        """Count a value as one that has a name from here on."""
        self.defined.add(value)
        self._of_storage[self._trace.values[value].storage].append(value)

    def ensure(self, value: int) -> None:
        """Give `value` a name: fetch persistent tensors, make views, both just before they are needed."""
        if value in self.defined:
            return
        call = self._call_of.get(value)
        if call is not None and not call.is_view and self._base(value) in self.defined:
            self._alias(value)
            return
        if call is None:
            role, name = role_of(self._trace.values[value].source)
            self.lines.append(f"{self.name(value)} = run.{role}[{quoted(name)}]")
            self.define(value)
            return
        if not call.is_view:
            raise AssertionError(f"value {self.name(value)} is read before call {call.call} has run")
        if call.target in NEUTRAL and self._same_form(value, call.reads[0]):
            self.ensure(call.reads[0])
            self._same_as[value] = call.reads[0]
            self.define(value)
            return
        call = self._of_whole(call)
        for read in call.reads:
            self.ensure(read)
        self.lines.append(self.assignment(call, call.arguments))
        for output in call.returns:
            if output >= 0 and output not in self.defined:
                self.define(output)

    def assignment(self, call: Call, arguments: str) -> str:
        """Return the text of a call, assigned to what it returns."""
        text = self._operation(call.target, arguments)
        if all(v < 0 for v in call.returns):
            return text
        names = [self.name(v) if v >= 0 else NOTHING for v in call.returns]
        results = [_targets(one) for one in grouped(names, call.groups)]
        return f"{', '.join(results)}{',' if call.returns_many and len(results) == 1 else ''} = {text}"

    def forget(self, storage: int) -> None:
        """Delete all names of a storage."""
        names = self._of_storage.pop(storage, [])
        if names:
            self.lines.append(f"del {', '.join(dict.fromkeys(map(self.name, names)))}")
        self.defined.difference_update(names)
        for value in names:
            self._same_as.pop(value, None)

    def _same_form(self, one: int, other: int) -> bool:
        a, b = self._trace.values[one], self._trace.values[other]
        return (a.storage, a.dtype, a.shape, a.stride, a.offset) == (b.storage, b.dtype, b.shape, b.stride, b.offset)

    def _of_whole(self, call: Call) -> Call:
        """Rewrite a view of a view without a name as a view of the latter's base, where all are contiguous."""
        while call.target == VIEW and call.reads[0] not in self.defined:
            inner = self._call_of.get(call.reads[0])
            if inner is None or inner.target != VIEW or not inner.is_view:
                break
            source = self._trace.values[inner.reads[0]]
            if 0 in source.shape or source.stride != _contiguous(source.shape):
                break
            shape = list(self._trace.values[call.returns[0]].shape)
            arguments = json.dumps({"args": [{"value": source.value}, shape], "kwargs": {}})
            call = replace(call, arguments=arguments, reads=(source.value,))
        return call

    def _operation(self, target: str, arguments: str) -> str:
        method = METHODS.get(target) or ALIKE.get(target)
        if method is not None and (split := split_receiver(arguments)) is not None:
            tensor, rest = split
            return f"{self.name(tensor)}.{method}({render_arguments(rest, self.name, spread=target in SPREAD)})"
        if target in FUNCTIONS:
            return f"torch.{FUNCTIONS[target]}({render_arguments(arguments, self.name)})"
        operator = operator_name(target) if target.startswith("aten.") else f"torch.ops.{operator_name(target)}"
        return f"{operator}({render_arguments(arguments, self.name)})"

    def _base(self, value: int) -> int:
        """Return the first value of the storage that `value` is in."""
        return self.base_of[self._trace.values[value].storage]

    def _alias(self, value: int) -> None:
        """Name the value that an in-place call returned like the reloaded memory that it shares."""
        v, base = self._trace.values[value], self.name(self._base(value))
        self.lines.append(
            f"{self.name(value)} = aten.as_strided.default({base}, {list(v.shape)}, {list(v.stride)}, {v.offset})"
        )
        self.define(value)


def _targets(names: str | list[str]) -> str:
    """Return the target that one result is assigned to."""
    if isinstance(names, str):
        return names
    if all(name == NOTHING for name in names):
        return NOTHING
    return f"({', '.join(names)}{',' if len(names) == 1 else ''})"


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a tensor whose elements lie in their order."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
