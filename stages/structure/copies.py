"""Copies a batch with other tensors in it, without calling any class's `__init__` or changing the original."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Sequence
from typing import Any

import torch

from stowage.stages.structure.containers import builtin_of
from stowage.stages.structure.kinds import (
    Kind,
    attributes,
    dict_of,
    has_attributes,
    is_hidden,
    is_of,
    kind_of,
    slots_of,
    steps,
)
from stowage.stages.structure.parts import Walk


def with_tensors(batch: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Return a batch that has `tensors` where `batch` has its own, in the order of `leaves`.

    Containers are new, and so is every object with a tensor inside; what is shared in `batch`, cycles too, is shared
    in the same way. Objects without tensors are handed on.
    """
    return _Copy(batch, tensors).made


def copied(batch: Any) -> Any:
    """Return a batch with the same tensors in new containers: what is removed from one copy stays in the other."""
    walk = Walk(batch, "batch")
    return _Copy(batch, [part.item for part in walk.parts if part.kind == "tensor"]).made


class _Copy:
    def __init__(self, batch: Any, tensors: Sequence[torch.Tensor]) -> None:
        self._walk = Walk(batch, "batch")
        places = [part.path for part in self._walk.parts if part.kind == "tensor"]
        self._tensor_at = dict(zip(places, tensors, strict=True))
        self._made: dict[int, Any] = {}
        self.made = self._again(batch, "batch")

    def _again(self, item: Any, path: str) -> Any:
        kind = kind_of(type(item))
        if kind == "tensor":
            found = self._tensor_at.get(path)
            return found if found is not None else self._tensor_at[self._walk.first[id(item)]]
        if kind in ("plain", "array", "closed") or (kind == "object" and id(item) not in self._walk.holding):
            return item
        if id(item) in self._made:
            return self._made[id(item)]
        if is_of(item, (tuple, frozenset)):
            self._made[id(item)] = item  # in case the container contains itself
            made = self._immutable(item, kind, path)
        else:
            made = self._made[id(item)] = _blank(item)
            self._fill(made, item, kind, path)
        self._made[id(item)] = made
        return made

    def _parts(self, item: Any, kind: Kind, path: str) -> list[Any]:
        return [self._again(step.item, path + step.path) for step in steps(item, kind) if not step.mirrors]

    def _immutable(self, item: Any, kind: Kind, path: str) -> Any:
        base: Any = builtin_of(item)
        parts = self._parts(item, kind, path)
        try:
            made = base.__new__(type(item), parts)
        except TypeError:  # a class written in C, such as the result of torch.max
            made = type(item)(parts)
        self._attributes(made, item, path)
        return made

    def _fill(self, made: Any, item: Any, kind: Kind, path: str) -> None:
        if kind == "mapping":
            base = builtin_of(item)
            for key, value in zip(tuple(dict.keys(item)), self._parts(item, kind, path), strict=True):
                base.__setitem__(made, key, value)
        elif kind == "sequence":
            builtin_of(item).extend(made, self._parts(item, kind, path))
        elif kind == "set":
            set.update(made, self._parts(item, kind, path))
        self._attributes(made, item, path)

    def _attributes(self, made: Any, item: Any, path: str) -> None:
        if not has_attributes(item, kind_of(type(item))):
            return
        slots, own = dict(slots_of(type(item))), dict_of(made)
        for name, value in attributes(item):
            again = self._again(value, path if is_hidden(item, name) else f"{path}.{name}")
            if name in slots:
                slots[name].__set__(made, again)
            elif own is not None:
                own[name] = again


def _blank(item: Any) -> Any:
    """Return an object of the same class with nothing in it."""
    cls = type(item)
    for base in (OrderedDict, defaultdict, dict, list, deque, set):
        if is_of(item, base):
            made = base.__new__(cls)
            if is_of(item, defaultdict):
                defaultdict.__init__(made, item.default_factory)  # type: ignore[arg-type]
            if is_of(item, deque):
                deque.__init__(made, (), item.maxlen)
            return made
    try:
        return object.__new__(cls)
    except TypeError:  # its base class is written in C
        return copy.copy(item)
