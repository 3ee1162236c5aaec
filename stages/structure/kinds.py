"""Says which objects are looked into, and what their parts are.

Containers (dictionaries, lists, tuples, sets, deques, and their subclasses) have items, and subclasses of them also
have attributes; any other object of a user's or a library's class has attributes, including those in `__slots__`. No
code of these classes is run: no property, no `__getattr__`, and `__iter__` only of the built-in containers.
"""

from __future__ import annotations

import _thread
import enum
import sys
import threading
import types
from collections import UserDict, UserList, deque
from collections.abc import Callable, Generator, Iterator
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import nn

from stowage.stages.structure.containers import contents

Kind = Literal["tensor", "array", "plain", "mapping", "sequence", "set", "object", "closed"]
"""The ways to treat an object.

`closed` objects are not looked into: they are told apart by class, by name, or by their `repr` if it has no address.
"""

PLAIN: tuple[type, ...] = (
    bool, int, float, complex, str, bytes, type(None), range, slice, type(...), enum.Enum,
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
_ITEMS = (tuple, list, deque)
_CLOSED: tuple[type, ...] = (
    type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, Generator, nn.Module,
    torch.optim.Optimizer, torch.utils.data.Dataset, torch.utils.data.DataLoader, torch.utils.data.Sampler,
)  # fmt: skip
_OPEN_STANDARD = ("collections", "types", "argparse", "__main__")


class PathStep(NamedTuple):
    """One part of an object.

    Attributes:
        path: the Python code that reaches it from its owner: `['labels']`, `[0]`, `.mask`.
        label: the same as part of a name: `labels`, `0`, `mask`; "" where it shares its owner's name.
        item: the part itself.
        mirrors: it is an attribute of a container, and may be one of the container's items under another name.
    """

    path: str
    label: str
    item: Any
    mirrors: bool = False


def _kind_of(cls: type) -> Kind:
    if issubclass(cls, torch.Tensor):
        return "tensor"
    if issubclass(cls, (np.ndarray, np.generic)):
        return "array"
    if issubclass(cls, enum.Enum) or cls in PLAIN:
        return "plain"
    for kind, bases in (("mapping", (dict,)), ("sequence", _ITEMS), ("set", (set, frozenset))):
        if issubclass(cls, bases):
            return kind  # type: ignore[return-value]
    if issubclass(cls, threading.local):
        return "object"
    if issubclass(cls, _CLOSED):
        return "closed"
    package = cls.__module__.partition(".")[0]
    if (package in sys.stdlib_module_names or package == "builtins") and package not in _OPEN_STANDARD:
        return "closed"
    return "object" if _has_dict(cls) or slots_of(cls) else "closed"


kind_of: Callable[[type], Kind] = lru_cache(maxsize=4096)(_kind_of)
"""Return how objects of a class are treated; cached."""


def _has_dict(cls: type) -> bool:
    return bool(cls.__dictoffset__)


def _slots_of(cls: type) -> tuple[tuple[str, Any], ...]:
    found: dict[str, Any] = {}
    for owner in reversed(cls.__mro__):
        if "__slots__" in owner.__dict__:
            found.update((k, v) for k, v in owner.__dict__.items() if isinstance(v, types.MemberDescriptorType))
    return tuple(found.items())


slots_of: Callable[[type], tuple[tuple[str, Any], ...]] = lru_cache(maxsize=4096)(_slots_of)
"""Return the names and descriptors of the `__slots__` of a class and its bases; cached."""


def is_of(item: Any, classes: type | tuple[type, ...]) -> bool:
    """Say whether an object is of one of some classes; `isinstance` would ask the object, and run its code."""
    return issubclass(type(item), classes)


def dict_of(item: Any) -> dict[str, Any] | None:
    """Return the dictionary of an object's attributes; None where it has none, or its class hides it."""
    if is_of(item, threading.local):  # which has a dictionary for each thread
        return _thread._local.__getattribute__(item, "__dict__")  # type: ignore[no-any-return]
    descriptor = _dict_descriptor(type(item))  # type: ignore[arg-type]
    found = None if descriptor is None else descriptor.__get__(item)
    return found if isinstance(found, dict) else None


def attributes_of(item: Any) -> Any:
    """Return the attributes of an object to be read or changed, those of a class to be read.

    Raises:
        AttributeError: the object has none.
    """
    found = vars(item) if is_of(item, type) else dict_of(item)
    if found is None:
        raise AttributeError(f"An object of class {type(item).__name__} has no attributes.")
    return found


@lru_cache(maxsize=4096)
def _dict_descriptor(cls: type) -> Any:
    found = next((vars(owner)["__dict__"] for owner in cls.__mro__ if "__dict__" in vars(owner)), None)
    return found if isinstance(found, (types.GetSetDescriptorType, types.MemberDescriptorType)) else None


UNSET: Any = object()
"""What a slot has that was never set."""


def in_slot(item: Any, slot: Any) -> Any:
    """Return what an object has in the slot of a descriptor, `UNSET` for nothing."""
    try:
        return slot.__get__(item, type(item))
    except AttributeError:
        return UNSET


def set_slot(item: Any, slot: Any, value: Any) -> None:
    """Set a slot by its descriptor; `UNSET` deletes what is there."""
    if in_slot(item, slot) is not value:
        slot.__delete__(item) if value is UNSET else slot.__set__(item, value)


def attributes(item: Any) -> Iterator[tuple[str, Any]]:
    """Yield the name and value of each attribute, in the order in which they were set, without computing any."""
    yield from tuple((dict_of(item) or {}).items())
    for name, slot in slots_of(type(item)):
        if (value := in_slot(item, slot)) is not UNSET:
            yield name, value


def steps(item: Any, kind: Kind) -> Iterator[PathStep]:
    """Yield the parts of an object of the given kind."""
    if kind == "mapping":
        for position, (key, value) in enumerate(contents(item)):
            name = repr(key) if kind_of(type(key)) == "plain" or _is_plain_tuple(key) else f"key {position}"
            yield PathStep(f"[{name}]", str(key) if name[0] != "k" else name, value)
    elif kind == "sequence":
        fields = getattr(type(item), "_fields", None) if is_of(item, tuple) else None
        for position, value in enumerate(contents(item)):
            if fields and position < len(fields):
                yield PathStep(f".{fields[position]}", str(fields[position]), value)
            else:
                yield PathStep(f"[{position}]", str(position), value)
    elif kind == "set":
        members = contents(item)
        plain = all(kind_of(type(value)) == "plain" for value in members)
        for position, value in enumerate(sorted(members, key=repr) if plain else members):
            yield PathStep(f"{{{position}}}", str(position), value)
    if has_attributes(item, kind):
        for name, value in attributes(item):
            hidden = is_hidden(item, name)
            yield PathStep("" if hidden else f".{name}", "" if hidden else name, value, kind != "object")


def has_attributes(item: Any, kind: Kind) -> bool:
    """Say whether an object's parts include its attributes: those of objects and of users' container classes do."""
    return kind == "object" or type(item).__module__ not in ("builtins", "collections")


def is_hidden(item: Any, name: str) -> bool:
    """Say whether an attribute holds the owner's own items, as `data` of a `UserDict` or `UserList` does."""
    return name == "data" and is_of(item, (UserDict, UserList))


def _is_plain_tuple(key: Any) -> bool:
    return type(key) is tuple and all(kind_of(type(part)) == "plain" for part in key)
