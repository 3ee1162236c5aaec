"""Reads and restores lists, tuples, sets and dictionaries by their built-in methods.

What a subclass does in methods of its own (logging, checking, counting, reading from a file) is not run.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from functools import lru_cache
from typing import Any

CHANGEABLE = (dict, list, deque, set)
"""What can be restored; subclasses too."""

_BUILTIN = (OrderedDict, dict, list, deque, set, tuple, frozenset)
_MAPPINGS = (OrderedDict, dict)


@lru_cache(maxsize=4096)
def _base(cls: type) -> Any:
    return next((kind for kind in _BUILTIN if issubclass(cls, kind)), None)


def builtin_of(container: Any) -> Any:
    """Return the built-in class of a container, whose methods read and change it.

    Raises:
        TypeError: it is none.
    """
    found = _base(type(container))  # type: ignore[arg-type]
    if found is None:
        raise TypeError(f"An object of class {type(container).__name__} has no items.")
    return found


def contents(container: Any) -> list[Any]:
    """Return the members of a container, pairs of key and value for a dictionary."""
    kind = builtin_of(container)
    return list(kind.items(container) if kind in _MAPPINGS else kind.__iter__(container))


def item_of(container: Any, key: Any) -> Any:
    """Return the member with a key or at a position."""
    return builtin_of(container).__getitem__(container, key)


def length_of(container: Any) -> int:
    """Return how many members a container has."""
    length: int = builtin_of(container).__len__(container)
    return length


def put_back(container: Any, before: list[Any]) -> None:
    """Make the members, and their order, what they were; nothing is written where they are."""
    kind, now = builtin_of(container), contents(container)
    if kind in _MAPPINGS:
        if len(now) != len(before) or any(a[0] is not b[0] or a[1] is not b[1] for a, b in zip(now, before)):
            kind.clear(container)
            for key, value in before:
                kind.__setitem__(container, key, value)
    elif not same_members(now, before):
        kind.clear(container)
        add(container, before)


def add(container: Any, members: Any) -> None:
    """Add members to a set, or behind those of a list or deque."""
    kind = builtin_of(container)
    (set.update if kind is set else kind.extend)(container, members)


def same_members(one: list[Any], other: list[Any]) -> bool:
    """Say whether two lists have the same objects in the same order."""
    return len(one) == len(other) and all(a is b for a, b in zip(one, other))
