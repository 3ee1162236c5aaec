"""Compares two records of one step that may differ in numbers alone, and finds these numbers.

A number that the user changes (a weight of a loss, a rate of dropout, a temperature) is among the arguments of some
calls, or in a constant tensor made from it. If everything else of the step is as before, its plan is too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, NamedTuple, TypeVar

from stowage.stages.ir.trace import Call, Constant

Record = TypeVar("Record", bound=Any)
"""Either `Recorded` or `RecordedForward`."""

Number = bool | int | float | complex

_COMPARED_APART = ("calls", "constants", "notices", "form")
_FREE = ("arguments", "replay_arguments", "location")
_TEXTS = ("arguments", "replay_arguments")


class Spot(NamedTuple):
    """The place of a number in a record.

    Attributes:
        call: position of the call.
        text: the field of the call that has the number in its JSON.
        path: keys and positions in the JSON.
    """

    call: int
    text: str
    path: tuple[str | int, ...]


class Difference(NamedTuple):
    """The numbers in which two records of one step differ.

    Attributes:
        numbers: spot -> the number in the first record and in the second.
        constants: those of the second record, where their contents differ; else None.
    """

    numbers: dict[Spot, tuple[Number, Number]]
    constants: list[Constant] | None

    def __bool__(self) -> bool:
        return bool(self.numbers) or self.constants is not None


def compare(one: Record, other: Record) -> Difference | None:
    """Find where numbers differ; return None if the steps differ in anything else."""
    for field in fields(one):
        if field.name not in _COMPARED_APART and not _equal(getattr(one, field.name), getattr(other, field.name)):
            return None
    forms = [[(c.value, len(c.content)) for c in record.constants] for record in (one, other)]
    if len(one.calls) != len(other.calls) or forms[0] != forms[1]:
        return None
    found: dict[Spot, tuple[Number, Number]] = {}
    for mine, theirs in zip(one.calls, other.calls):
        if mine == theirs:
            continue
        if replace(mine, **{name: getattr(theirs, name) for name in _FREE}) != theirs:
            return None
        for text in _TEXTS:
            before, now = getattr(mine, text), getattr(theirs, text)
            if before == now:
                continue
            if not (before and now) or not _walk(json.loads(before), json.loads(now), mine.call, text, (), found):
                return None
    return Difference(found, None if one.constants == other.constants else other.constants)


def _equal(one: Any, other: Any) -> bool:
    """Say whether two fields are equal; mappings to tensors must have the same tensor objects."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(one[k] is other[k] for k in one)
    return bool(one == other)


def _walk(
    one: Any, other: Any, call: int, text: str, path: tuple[str | int, ...], found: dict[Spot, tuple[Number, Number]]
) -> bool:
    a, b = number_of(one), number_of(other)
    if a is not None and b is not None:
        if type(a) is not type(b):
            return False
        if one != other:
            found[Spot(call, text, path)] = (a, b)
        return True
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_walk(one[k], other[k], call, text, (*path, k), found) for k in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(
            _walk(x, y, call, text, (*path, n), found) for n, (x, y) in enumerate(zip(one, other))
        )
    return bool(one == other)


def number_of(item: Any) -> Number | None:
    """Return a number as it stands in the JSON of arguments; None for anything else."""
    if isinstance(item, (int, float)) and not isinstance(item, bool):
        return item
    if isinstance(item, dict) and item.keys() == {"float"}:
        return float(item["float"])
    if isinstance(item, dict) and item.keys() == {"complex"}:
        return complex(*item["complex"])
    return None


def marked(record: Record, names: Mapping[Spot, str]) -> Record:
    """Return the record with names in place of some numbers; generated code reads these numbers by name."""
    by_call: dict[int, list[Spot]] = {}
    for spot in names:
        by_call.setdefault(spot.call, []).append(spot)
    calls = [
        _mark(call, {s: names[s] for s in by_call[call.call]}) if call.call in by_call else call
        for call in record.calls
    ]
    result: Record = replace(record, calls=calls)
    return result


def _mark(call: Call, names: Mapping[Spot, str]) -> Call:
    if not names:
        return call
    texts = {text: getattr(call, text) for text in _TEXTS}
    for spot, name in names.items():
        content = json.loads(texts[spot.text])
        at = content
        for step in spot.path[:-1]:
            at = at[step]
        at[spot.path[-1]] = {"number": name}
        texts[spot.text] = json.dumps(content, separators=(",", ":"))
    return replace(call, **texts)
