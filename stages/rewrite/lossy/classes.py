"""Names the classes of tensors among which compression is chosen: the same tensor of every layer is one class."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

from stowage.stages.ir.lossy import GradientError
from stowage.stages.ir.trace import TraceTables
from stowage.stages.ir.variant import VariantName, ranges_of
from stowage.stages.ir.whole_copies import whole_copies
from stowage.stages.rewrite.lossy.codecs import CODECS
from stowage.stages.rewrite.lossy.compress import compress_values
from stowage.stages.rewrite.lossy.saved import Saved, saved_values

ALONE = " alone"
"""End of the name of a class of values of which nothing is computed again."""

WHILE_FROZEN = " while frozen"
"""End of the name of a class of values that are packed only for steps in which what reads them is frozen."""

_MANY = "*"
"""Stands in the name of a class for the number of a layer."""


def classes_of(trace: TraceTables, saved: Sequence[Saved]) -> dict[int, str]:
    """Return the class of each value that may be packed, by the call that makes it.

    Values are of one class that are made by the same operator, in the same module of layers that differ in their number
    alone, are read by the same operators of backward, and have the same shape.
    """
    named: dict[int, tuple[str, tuple[object, ...]]] = {}
    before: Counter[tuple[str, str]] = Counter()
    for value in saved:
        call = trace.calls[value.maker]
        operator = call.target.split(".")[1]
        before[call.module, operator] += 1
        number = before[call.module, operator]
        module = ".".join(_MANY if part.isdigit() else part for part in call.module.split(".")) or trace.meta.model
        name = f"{module} {operator}" + (f" {number}" if number > 1 else "")
        kind: tuple[object, ...] = (
            tuple(trace.values[part.base].form for part in value.parts),
            tuple(trace.calls[c].target for c in value.readers),
            tuple(trace.calls[c].target for c in value.again),
        )
        named[value.maker] = name, kind
    kinds: Mapping[str, dict[tuple[object, ...], int]] = defaultdict(dict)
    for name, kind in named.values():
        kinds[name].setdefault(kind, len(kinds[name]))
    return {
        maker: name if len(kinds[name]) == 1 else f"{name} ({kinds[name][kind] + 1})"
        for maker, (name, kind) in named.items()
    }


def described(trace: TraceTables, variant: str, errors: Iterable[GradientError]) -> tuple[tuple[str, ...], float]:
    """Return what a variant keeps in fewer bits, kind, layers and class, and the most that its gradient may change by.

    Errors of classes are independent: their squares add up. A class of which only some layers are packed counts whole.

    Args:
        trace: the step as it was recorded.
        variant: the name of the variant.
        errors: what was measured.
    """
    found = _packed(trace, variant)
    rows = {(e.kind, e.tensors): e.squared_error for e in errors}
    squared = sum(0.0 if CODECS[kind].exact else rows.get((kind, name), math.inf) for kind, name in found)
    return tuple(_text(trace, kind, name, values) for (kind, name), values in found.items()), math.sqrt(squared)


def effects(trace: TraceTables, variant: str, errors: Iterable[GradientError]) -> tuple[str, ...]:
    """Return what each class that `described` names does to the gradient, in words.

    Args:
        trace: the step as it was recorded.
        variant: the name of the variant.
        errors: what was measured.
    """
    rows = {(e.kind, e.tensors): e for e in errors}
    return tuple(
        "changes nothing" if CODECS[kind].exact else _effect(rows.get((kind, name)))
        for kind, name in _packed(trace, variant)
    )


def _effect(measured: GradientError | None) -> str:
    if measured is None:
        return "was not measured"
    changed = f"changes the gradient by {math.sqrt(measured.squared_error):.3%} at most"
    if not measured.variance:
        return changed
    return (
        f"{changed}; its variance from batch to batch is {measured.coded_variance:.6g} of its mean square, without "
        f"codes {measured.variance:.6g}"
    )


def _packed(trace: TraceTables, variant: str) -> dict[tuple[str, str], list[Saved]]:
    """Return the values that a variant packs, by codec and class."""
    parts = {name: sites for name, sites in VariantName.of(variant).parts if name in CODECS}
    if not parts:
        return {}
    found: dict[tuple[str, str], list[Saved]] = {}
    for (kind, name), members in Classes(trace).members(parts).items():
        sites = parts[kind]
        own = [saved for site, saved in members if sites is None or site in sites]
        if own:
            found[kind, name] = own
    return found


def _text(trace: TraceTables, kind: str, name: str, values: Sequence[Saved]) -> str:
    """Return the kind and the class, with the numbers of the layers in the place of each star."""
    numbers = [_numbers(trace.calls[value.maker].module) for value in values]
    if name.count(_MANY) != len(numbers[0]):
        return f"{CODECS[kind].kind}: {name}"
    places = [sorted(set(own)) for own in zip(*numbers, strict=True)]
    for own in places:
        name = name.replace(_MANY, f"[{ranges_of(own)}]", 1)
    whole = math.prod(map(len, places)) == len(set(numbers))
    return f"{CODECS[kind].kind}: {name}" + ("" if whole else f", {len(set(numbers))} of these")


def _numbers(module: str) -> tuple[int, ...]:
    return tuple(int(part) for part in module.split(".") if part.isdigit())


class Classes:
    """The classes of the values of one step that may be packed."""

    def __init__(self, trace: TraceTables) -> None:
        """Take the step as it was recorded."""
        self._trace = trace

    @cached_property
    def _saved(self) -> list[tuple[Saved, str]]:
        saved = saved_values(self._trace)
        names = classes_of(self._trace, saved)
        return [(value, names[value.maker]) for value in saved]

    @cached_property
    def _alone(self) -> list[tuple[Saved, str]]:
        saved = saved_values(self._trace, alone=True)
        names = classes_of(self._trace, saved)
        return [(value, f"{names[value.maker]}{ALONE}") for value in saved]

    def members(self, kinds: Iterable[str]) -> dict[tuple[str, str], list[tuple[int, Saved]]]:
        """Return for each codec and class the sites of its rewrite, each with the value that is packed there.

        Args:
            kinds: names of codecs.
        """
        found: dict[tuple[str, str], list[tuple[int, Saved]]] = defaultdict(list)
        for kind in kinds:
            codec = CODECS[kind]
            values = self._alone if codec.alone else self._saved
            for site, (saved, name) in enumerate(v for v in values if codec.fits(self._trace, v[0])):
                found[kind, f"{name}{WHILE_FROZEN}" if codec.for_freezing else name].append((site, saved))
        return dict(found)

    def trace(self, kind: str, name: str) -> TraceTables:
        """Return the trace in which one class alone is kept in one kind."""
        members = self.members([kind])[kind, name]
        return compress_values(CODECS[kind], self._trace, [saved for _, saved in members])

    def frozen(self, kind: str, name: str) -> tuple[TraceTables, frozenset[str]]:
        """Return the same trace as it is where what decides is frozen, and the parameters which that are."""
        codec, members = CODECS[kind], self.members([kind])[kind, name]
        if not codec.for_freezing:
            return self.trace(kind, name), frozenset()
        frozen = frozenset().union(*(copy.parameters for copy in whole_copies(self.trace(kind, name)).values()))
        return compress_values(codec.while_frozen(), self._trace, [saved for _, saved in members]), frozen

    def everywhere(self, kinds: Iterable[str]) -> list[TraceTables]:
        """Return for each kind the trace in which all classes are kept in it: their calls are those of any choice."""
        found: list[TraceTables] = []
        for kind in kinds:
            members = [saved for own in self.members([kind]).values() for _, saved in own]
            if members:
                found.append(compress_values(CODECS[kind], self._trace, members))
        return found
