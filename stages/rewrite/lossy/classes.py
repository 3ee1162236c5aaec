"""Names the classes of tensors among which compression is chosen: the same tensor of every layer is one class."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

from stowage.stages.ir.lossy import GradientError
from stowage.stages.ir.trace import TraceTables
from stowage.stages.ir.variant import VariantName
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
    """Return what a variant keeps in fewer bits, kind and class, and the most that its gradient may change by.

    Errors of classes are independent: their squares add up. A class of which only some layers are packed counts whole.

    Args:
        trace: the step as it was recorded.
        variant: the name of the variant.
        errors: what was measured.
    """
    parts = {name: sites for name, sites in VariantName.of(variant).parts if name in CODECS}
    if not parts:
        return (), 0.0
    rows = {(e.kind, e.tensors): e.squared_error for e in errors}
    squared, found = 0.0, []
    for (kind, name), members in Classes(trace).members(parts).items():
        sites = parts[kind]
        if sites is None or not {site for site, _ in members}.isdisjoint(sites):
            found.append(f"{CODECS[kind].kind}: {name}")
            squared += 0.0 if CODECS[kind].exact else rows.get((kind, name), math.inf)
    return tuple(found), math.sqrt(squared)


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
