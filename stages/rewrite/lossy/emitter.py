"""Makes the calls, values and storages that a rewrite adds to a trace."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from stowage.stages.ir.trace import AGAIN, INSIDE, Call, Phase, Storage, TraceTables, Value
from stowage.stages.rewrite.lossy.saved import contiguous_stride

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "uint8": 1, "bool": 1, "float8_e4m3fn": 1}
BYTES |= {"float8_e5m2": 1, "int32": 4, "int64": 8}
"""Bytes of an element, of the types that codes have."""


def tensor(value: int) -> dict[str, int]:
    """Return what stands for a value among the arguments of a call."""
    return {"value": value}


@dataclass(frozen=True)
class Form:
    """The type, shape and strides of a tensor that a new call returns."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @staticmethod
    def like(row: Value, dtype: str = "") -> Form:
        """Return the form of a value, in another type if one is given."""
        return Form(dtype or row.dtype, row.shape, row.stride)

    @staticmethod
    def contiguous(dtype: str, shape: Sequence[int]) -> Form:
        """Return the form of a contiguous tensor."""
        return Form(dtype, tuple(shape), contiguous_stride(tuple(shape)))

    @property
    def nbytes(self) -> int:
        """Return the bytes that such a tensor takes."""
        return math.prod(self.shape) * BYTES[self.dtype]


@dataclass(frozen=True)
class Place:
    """Says where in a step new calls are made, and under which names.

    Attributes:
        phase: the phase of the step.
        module: the path of the module that they belong to.
        location: the line of the user's code that they belong to.
        prefix: the beginning of the names of values.
    """

    phase: Phase
    module: str
    location: str
    prefix: str


@dataclass
class Emitter:
    """Collects what a rewrite adds to a trace, and what it changes.

    Attributes:
        trace: the trace before.
        storages, values: its tables, with what is added.
        before, behind: calls that are added before and behind a call of the trace.
        changed: calls of the trace that read or return something else.
    """

    trace: TraceTables
    storages: list[Storage] = field(init=False)
    values: list[Value] = field(init=False)
    before: dict[int, list[Call]] = field(default_factory=lambda: defaultdict(list), init=False)
    behind: dict[int, list[Call]] = field(default_factory=lambda: defaultdict(list), init=False)
    changed: dict[int, Call] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.storages, self.values = list(self.trace.storages), list(self.trace.values)
        self._names = {v.name for v in self.values}

    def storage(self, nbytes: int, name: str) -> int:
        """Add a temporary storage."""
        self.storages.append(Storage(len(self.storages), nbytes, "temporary", name))
        return len(self.storages) - 1

    def value(self, name: str, form: Form, storage: int, offset: int = 0) -> int:
        """Add a value that a new call returns; its name gets a number where it is taken."""
        taken, number = name, 0
        while taken in self._names:
            number += 1
            taken = f"{name}_{number}"
        self._names.add(taken)
        self.values.append(Value(len(self.values), storage, 0, 0, form.dtype, form.shape, form.stride, offset, taken))
        return len(self.values) - 1

    def finished(self, what: str) -> TraceTables:
        """Return the trace with everything that was added and changed."""
        calls: list[Call] = []
        for call in self.trace.calls:
            mine = [*self.before.get(call.call, ()), self.changed.get(call.call, call), *self.behind.get(call.call, ())]
            calls += [replace(each, call=len(calls) + i) for i, each in enumerate(mine)]
        made = {v: (c.call, i) for c in calls for i, v in enumerate(c.returns) if v >= 0}
        values = [
            replace(v, call=made[v.value][0], output=made[v.value][1]) if v.value in made else v for v in self.values
        ]
        found = replace(self.trace, storages=self.storages, values=values, calls=calls)
        found.check(what)
        return found


@dataclass
class Lines:
    """Writes calls one after another at one place."""

    emitter: Emitter
    place: Place
    calls: list[Call] = field(default_factory=list)

    def form(self, value: int) -> Value:
        """Return a value's row."""
        return self.emitter.values[value]

    def make(
        self, target: str, *args: Any, form: Form, name: str, inside: bool = False, kind: str = "", **kwargs: Any
    ) -> int:
        """Add a call that makes a tensor in a storage of its own, and return its value.

        With `inside` only calls of the same place read it, and all of them are one compute node. The storage has a
        `kind` in its name.
        """
        name = f"{self.place.prefix}_{name}"
        again = kind + (AGAIN if self.place.phase == "backward" else "")
        storage = self.emitter.storage(form.nbytes, f"{name}{INSIDE if inside else again}")
        made = self.emitter.value(name, form, storage)
        self._add(target, args, kwargs, made)
        return made

    def make_both(self, target: str, *args: Any, forms: tuple[Form, Form], names: tuple[str, str]) -> tuple[int, int]:
        """Add a call that makes two tensors, which only calls of the same place read, and return their values."""
        made: list[int] = []
        for form, name in zip(forms, names, strict=True):
            text = f"{self.place.prefix}_{name}"
            made.append(self.emitter.value(text, form, self.emitter.storage(form.nbytes, f"{text}{INSIDE}")))
        self._add(target, args, {}, *made)
        return made[0], made[1]

    def write(self, target: str, into: int, *args: Any, name: str, **kwargs: Any) -> int:
        """Add a call that writes into a tensor and returns it; return the value."""
        row = self.form(into)
        made = self.emitter.value(f"{self.place.prefix}_{name}", Form.like(row), row.storage, row.offset)
        self._add(target, (tensor(into), *args), kwargs, made, mutates=(row.storage,))
        return made

    def fill(self, target: str, into: int, *args: Any) -> None:
        """Add a call that writes into a tensor, which keeps its value."""
        self._add(target, (tensor(into), *args), {}, -1, mutates=(self.form(into).storage,))

    def view(self, target: str, of: int, *args: Any, name: str, shape: Sequence[int], offset: int = 0) -> int:
        """Add a call that returns a contiguous window on a tensor, and return its value."""
        row = self.form(of)
        form = Form.contiguous(row.dtype, shape)
        made = self.emitter.value(f"{self.place.prefix}_{name}", form, row.storage, row.offset + offset)
        self._add(target, (tensor(of), *args), {}, made, is_view=True)
        return made

    def _add(
        self,
        target: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *returned: int,
        mutates: tuple[int, ...] = (),
        is_view: bool = False,
    ) -> None:
        arguments = json.dumps({"args": list(args), "kwargs": dict(kwargs)}, separators=(",", ":"))
        reads = tuple(int(v) for v in re.findall(r'\{"value":(\d+)\}', arguments))
        self.calls.append(
            Call(
                call=-1,
                target=target,
                arguments=arguments,
                reads=reads,
                returns=returned,
                returns_many=len(returned) > 1,
                mutates=mutates,
                is_view=is_view,
                is_random=False,
                replay_arguments="",
                phase=self.place.phase,
                module=self.place.module,
                location=self.place.location,
                signature=signed(target, arguments, self.emitter.values),
            )
        )


def signed(target: str, arguments: str, values: Sequence[Value]) -> str:
    """Return the signature of a call: operator and arguments, every tensor by its form."""
    return target + re.sub(r'\{"value":(\d+)\}', lambda m: f'"{values[int(m.group(1))].form}"', arguments)


def reading(call: Call, renamed: Mapping[int, int], returns: tuple[int, ...] | None = None) -> Call:
    """Return a call that reads other values of the same forms, and returns others."""

    def text(arguments: str) -> str:
        return re.sub(
            r'\{"value":(\d+)\}',
            lambda m: f'{{"value":{renamed.get(int(m.group(1)), int(m.group(1)))}}}',
            arguments,
        )

    return replace(
        call,
        arguments=text(call.arguments),
        replay_arguments=text(call.replay_arguments),
        reads=tuple(renamed.get(v, v) for v in call.reads),
        returns=call.returns if returns is None else returns,
    )
