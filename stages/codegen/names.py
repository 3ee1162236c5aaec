"""Keeps the names of tensors in a step: fetches, views and renames right before a tensor is read, and deletes."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from stowage.stages.ir.arguments import render_arguments, split_receiver
from stowage.stages.ir.operators import ALIKE, FUNCTIONS, METHODS, SPREAD
from stowage.stages.ir.results import grouped
from stowage.stages.ir.source import identifier, operator_name, quoted, role_of
from stowage.stages.ir.trace import Call, TraceTables, base_values
from stowage.stages.ir.units import ALWAYS, implies

NOTHING = "_"
"""Name of results that a step ignores."""
VIEW = "aten.view.default"
NEUTRAL = frozenset({VIEW, "aten.expand.default", "aten.slice.Tensor", "aten.detach.default", "aten.alias.default"})
"""Operators whose result shows the numbers of their first argument as they are (unlike a conjugate)."""


class Identifiers:
    """The lines of a step so far, and which tensors have a name in them.

    Attributes:
        lines: lines without indentation; a row's action adds to them.
        defined: values that have a name now, with the guard under which they have it.
        base_of: storage -> the first value in it.
        guard: the guard of the lines that are being written.
    """

    def __init__(self, trace: TraceTables) -> None:
        self._trace = trace
        self.lines: list[str] = []
        self.defined: dict[int, int] = {}
        self.guard = ALWAYS
        self.base_of = base_values(trace)
        self._same_as: dict[int, int] = {}
        """Views that show what another value shows, in the same form."""
        self._of_storage: dict[int, list[int]] = defaultdict(list)
        self._call_of = {v: c for c in trace.calls for v in c.returns if v >= 0}
        self._block = ("", -1)
        """The condition of the block that was written last, and where it ends."""

    def name(self, value: int) -> str:
        """Return the name of a value in the text."""
        while value in self._same_as:
            value = self._same_as[value]
        return identifier(self._trace.values[value].name)

    def define(self, value: int) -> None:
        """Count a value as one that has a name from here on."""
        self.defined[value] = self.defined.get(value, 0) | self.guard
        self._of_storage[self._trace.values[value].storage].append(value)

    def has(self, value: int) -> bool:
        """Return whether a value has a name wherever the lines that are being written run."""
        return value in self.defined and implies(self.guard, self.defined[value])

    def ensure(self, value: int) -> None:
        """Give `value` a name: fetch persistent tensors, make views, both just before they are needed."""
        if self.has(value):
            return
        call = self._call_of.get(value)
        if call is not None and not call.is_view and self.has(self._base(value)):
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
            if output >= 0 and not self.has(output):
                self.define(output)

    def assignment(self, call: Call, arguments: str) -> str:
        """Return the text of a call, assigned to what it returns."""
        text = self._operation(call.target, arguments)
        if all(v < 0 for v in call.returns):
            return text
        names = [self.name(v) if v >= 0 else NOTHING for v in call.returns]
        results = [_targets(one) for one in grouped(names, call.groups)]
        return f"{', '.join(results)}{',' if call.returns_many and len(results) == 1 else ''} = {text}"

    def made(self, value: int, target: str, arguments: str) -> str:
        """Return the text of an operator, assigned to the name of a value."""
        return f"{self.name(value)} = {self._operation(target, arguments)}"

    def forget(self, storage: int) -> None:
        """Delete all names of a storage; those that not every run has given it are set to nothing."""
        values = self._of_storage.pop(storage, [])
        certain = [v for v in values if self.has(v)]
        if certain:
            self.lines.append(f"del {', '.join(dict.fromkeys(map(self.name, certain)))}")
        self._clear(set(map(self.name, values)) - set(map(self.name, certain)))
        for value in values:
            self.defined.pop(value, None)
        for value in values:
            self._same_as.pop(value, None)

    def release(self, storages: Iterable[int]) -> None:
        """Set all names of storages to nothing, for runs that read them no more."""
        self._clear({self.name(v) for s in storages for v in self._of_storage.get(s, ())})

    def lack(self, values: Iterable[int]) -> None:
        """Let values be nothing, in runs in which they do not exist."""
        self._clear(set(map(self.name, values)))

    def _clear(self, names: Collection[str]) -> None:
        if names:
            self.lines.append(" = ".join([*sorted(names), "None"]))

    def surround(self, condition: str, start: int) -> None:
        """Put the lines from `start` on into a block with a condition: the one before, where it is the same."""
        inside = self.lines[start:]
        if not inside or not condition:
            return
        del self.lines[start:]
        if self._block != (condition, start):
            self.lines.append(f"if {condition}:")
        self.lines += [f"    {line}" for line in inside]
        self._block = (condition, len(self.lines))

    def _same_form(self, one: int, other: int) -> bool:
        a, b = self._trace.values[one], self._trace.values[other]
        return (a.storage, a.dtype, a.shape, a.stride, a.offset) == (b.storage, b.dtype, b.shape, b.stride, b.offset)

    def _of_whole(self, call: Call) -> Call:
        """Rewrite a view of a view without a name as a view of the latter's base, where all are contiguous."""
        while call.target == VIEW and not self.has(call.reads[0]):
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
