"""Groups the parameters of a step into units, each of which trains or is frozen as a whole.

`parameter`: each parameter with more than one dimension and each weight of a layer normalisation by itself, as in
SlimFit's code; others, such as biases, always train. `saving`: parameters that save memory only when they are frozen
together, because their gradients are computed from the same saved tensor (q, k and v), or by the same call; a bias goes
with the weight of its module. `block`: each entry of a list of modules with everything in it, and other modules by
themselves.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile

from stowage.stages.freezing.descent import Recorded, descendants
from stowage.stages.ir.collectives import GATHER
from stowage.stages.ir.errors import ParameterError
from stowage.stages.ir.freezable import UnitKind
from stowage.stages.ir.units import Unit

_ENTRY = re.compile(r"(?:.*?\.)?\d+(?=\.)")
_NORMALISATIONS = ("aten.native_layer_norm_backward",)


def units_of(trace: Recorded, kind: UnitKind = "saving") -> list[Unit]:
    """Return the units of a step, in the order of its parameters.

    Raises:
        ParameterError: there is no such kind of units.
    """
    if kind not in UNIT_KINDS:
        raise ParameterError(f"freeze.units is {kind!r}: write one of {', '.join(UNIT_KINDS)}.")
    names = [g.parameter for g in trace.gradients if g.gradient_value >= 0]
    return _named(UNIT_KINDS[kind](trace, names))


def _by_parameter(trace: Recorded, names: Sequence[str]) -> list[list[str]]:
    scales = _normalisation_weights(trace)
    shape = {g.parameter: trace.values[g.parameter_value].shape for g in trace.gradients}
    return [[name] for name in names if len(shape[name]) > 1 or name in scales]


def _by_block(trace: Recorded, names: Sequence[str]) -> list[list[str]]:
    groups: dict[str, list[str]] = {}
    for name in names:
        entry = _ENTRY.match(name)
        groups.setdefault(entry[0] if entry else _module(name), []).append(name)
    return list(groups.values())


def _by_saving(trace: Recorded, names: Sequence[str]) -> list[list[str]]:
    groups = _Groups(names)
    reads: dict[str, set[int]] = {name: set() for name in names}
    """Storages of backward that the gradient of a parameter alone is made from."""
    saved: dict[int, str] = {}
    keeps: set[str] = set()
    makers: dict[int, str] = {}
    gradients = {g.gradient_value: g.parameter for g in trace.gradients if g.gradient_value >= 0}
    of = descendants(trace)
    made_forward = {v.storage for v in trace.values if v.call >= 0 and trace.calls[v.call].phase == "forward"}
    gathered = {trace.values[v].storage for call in trace.calls if call.target == GATHER for v in call.returns}
    passing = {s.storage for s in trace.storages if s.role == "temporary"} - gathered  # whole weights are weights
    for call in trace.calls:
        for value in call.returns:
            if value in gradients:
                groups.join(gradients[value], makers.setdefault(call.call, gradients[value]))
        own = of[call.call]
        if call.phase != "backward" or call.is_view or len(own) != 1:
            continue
        (name,) = own
        for storage in passing.intersection(trace.values[v].storage for v in call.reads):
            if storage in made_forward:
                groups.join(name, saved.setdefault(storage, name))
                keeps.add(name)
            else:
                reads[name].add(storage)
    for name in names:
        if name not in keeps and groups.alone(name):
            near = [n for n in names if _module(n) == _module(name) and n in keeps and reads[n] & reads[name]]
            if near:
                groups.join(name, near[0])
    return groups.all()


UNIT_KINDS: dict[UnitKind, Callable[[Recorded, Sequence[str]], list[list[str]]]] = {
    "saving": _by_saving,
    "parameter": _by_parameter,
    "block": _by_block,
}
"""Groups the names of parameters, for each kind of units."""


def _normalisation_weights(trace: Recorded) -> set[str]:
    found = set()
    for g in trace.gradients:
        value = trace.values[g.gradient_value] if g.gradient_value >= 0 else None
        while value is not None and value.call >= 0 and trace.calls[value.call].is_view:
            value = trace.values[trace.calls[value.call].reads[0]]
        made = value is not None and value.call >= 0 and value.output == 1
        if made and value is not None and trace.calls[value.call].target.startswith(_NORMALISATIONS):
            found.add(g.parameter)
    return found


def _module(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def _named(groups: Iterable[Sequence[str]]) -> list[Unit]:
    """Name each group by the module path that its members share, or by its first member where that is taken."""
    found: dict[str, Sequence[str]] = {}
    for group in groups:
        paths = [_module(name).split(".") for name in group]
        shared = ".".join(_beginning(paths))
        first = group[0] if len(group) == 1 else _module(group[0])
        choices = (first, group[0]) if len(group) == 1 else (shared, first, group[0])
        found[next(c for c in choices if c and c not in found)] = group
    return [Unit(name, tuple(group)) for name, group in found.items()]


def _beginning(paths: Sequence[Sequence[str]]) -> list[str]:
    """Return what all paths begin with."""
    return [parts[0] for parts in takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))]


class _Groups:
    """Joins names into groups, which keep the order of the names."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._of = {name: [name] for name in names}

    def join(self, one: str, other: str) -> None:
        """Put two names, and whatever is with them, into one group."""
        first, second = self._of[one], self._of[other]
        if first is not second:
            first += second
            self._of.update(dict.fromkeys(second, first))

    def alone(self, name: str) -> bool:
        """Return whether a name is a group of its own."""
        return len(self._of[name]) == 1

    def all(self) -> list[list[str]]:
        """Return the groups, in the order of their first names."""
        order = {name: i for i, name in enumerate(self._names)}
        distinct = {id(group): group for group in (self._of[name] for name in self._names)}
        return [sorted(group, key=order.__getitem__) for group in distinct.values()]
