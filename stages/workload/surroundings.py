"""Remembers plain data and tensors outside of the batch that a traced step can have read, and reads them again.

From the model, the loss and whatever else runs, everything is followed that the code that ran can have read: variables
of closures, defaults, globals and attributes of the user's modules and classes, attributes and items of the user's
objects. This is done once, after tracing; from then on only what was found is read again, which takes microseconds.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from stowage.stages.structure.values import value_text

Read = Callable[[Any], Any]
Look = Callable[[Any], Any]


class _Missing:
    def __repr__(self) -> str:
        return "absent"


MISSING: Any = _Missing()
"""Stands for something that is no longer there."""


class SurroundingPlace(NamedTuple):
    """Something that was reached.

    Attributes:
        path: its name for people: `loss.weights[2]`.
        owner: position of the root or place from which it was reached.
        read: gets it from its owner.
        look: gets what is compared from it; None where it only leads further.
    """

    path: str
    owner: int
    read: Read
    look: Look | None


class Surroundings:
    """The roots, places and tensors that were found.

    Attributes:
        paths: the paths of places that are compared.
        tensors: path -> a tensor that is neither the model's nor the batch's, as it was found.
    """

    def __init__(
        self, roots: Sequence[Any], places: Sequence[SurroundingPlace], tensors: Mapping[str, tuple[int, torch.Tensor]]
    ) -> None:
        self._roots = list(roots)
        self._places = list(places)
        self._positions = {path: position for path, (position, _) in tensors.items()}
        self._path_of = {id(tensor): path for path, (_, tensor) in reversed(list(tensors.items()))}
        self.paths = tuple(place.path for place in places if place.look is not None)
        self.tensors = {path: tensor for path, (_, tensor) in tensors.items()}

    def values(self) -> tuple[Any, ...]:
        """Return the values that are compared, as they are now, in the order of `paths`."""
        items = list(self._roots)
        found: list[Any] = []
        for _, owner, read, look in self._places:
            value = item = MISSING
            if items[owner] is not MISSING:
                try:
                    item = read(items[owner])
                    value = item if look is None or item is MISSING else look(item)
                except (AttributeError, KeyError, IndexError, TypeError, ValueError):
                    value = item = MISSING
            items.append(item)
            if look is not None:
                found.append(value)
        return tuple(found)

    def path_of(self, tensor: torch.Tensor) -> str | None:
        """Return the path where a tensor was found; None if it was not."""
        return self._path_of.get(id(tensor))

    def read(self, path: str) -> Any:
        """Return what is now at the place where a tensor was found; `MISSING` if nothing is."""
        position = self._positions[path]
        steps = []
        while position >= len(self._roots):
            place = self._places[position - len(self._roots)]
            steps.append(place.read)
            position = place.owner
        try:
            return functools.reduce(lambda item, step: step(item), reversed(steps), self._roots[position])
        except (AttributeError, KeyError, IndexError, TypeError, ValueError):
            return MISSING


def same_value(one: Any, other: Any) -> bool:
    """Say whether two values are equal, including their types and the sign of zero; a NaN equals itself."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if type(one) is tuple:
        return len(one) == len(other) and all(map(same_value, one, other))
    if type(one) is float:
        return (one == other and math.copysign(1, one) == math.copysign(1, other)) or (one != one and other != other)
    return bool(one == other)


def same_values(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Say whether all values are the same."""
    return len(one) == len(other) and all(map(same_value, one, other))


def differences(paths: Sequence[str], traced: tuple[Any, ...], now: tuple[Any, ...]) -> list[str]:
    """Write a sentence for each value that is not what it was when the step was traced."""
    return [
        f"{path} is {_text(value)}; the step was traced with {_text(before)}."
        for path, before, value in zip(paths, traced, now, strict=True)
        if not same_value(before, value)
    ]


def _text(value: Any) -> str:
    return getattr(value, "co_name", None) or (value_text(value) or type(value).__name__)
