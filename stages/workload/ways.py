"""One step from an object to a part of it: how the part is read again, and what of it is compared."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any, NamedTuple

from stowage.stages.structure.containers import contents, item_of, length_of
from stowage.stages.structure.kinds import attributes_of, is_of, kind_of
from stowage.stages.workload.surroundings import MISSING, Read


class Way(NamedTuple):
    """Says how something is reached from its owner.

    Attributes:
        item: what is reached.
        path: its name for people.
        read: gets it from its owner.
    """

    item: Any
    path: str
    read: Read


def itself(item: Any) -> Any:
    """Return the same object."""
    return item


def is_known(known: Any, item: Any) -> bool:
    """Say whether something is still the same object."""
    return item is known


def base(cls: type, item: Any) -> type:
    """Return a class that belongs to an object, or to a class derived from it."""
    return cls


def code(item: Any) -> Any:
    """Return the code of a function."""
    return item.__code__


def outline(item: Any) -> tuple[Any, ...]:
    """Return a container's class, and how many members it has; of a dictionary the order of its keys."""
    if not is_of(item, dict):
        return type(item), length_of(item)
    return type(item), *(key if kind_of(type(key)) == "plain" else id(key) for key, _ in contents(item))


def values(item: Any) -> tuple[Any, ...]:
    """Return the members of a sequence."""
    return tuple(contents(item))


def members(item: Any) -> frozenset[Any]:
    """Return the members of a set."""
    return frozenset(contents(item))


def identities(item: Any) -> frozenset[int]:
    """Return which objects a set has."""
    return frozenset(map(id, contents(item)))


def form_of_array(item: Any) -> Any:
    """Return the type and shape of an array that is too long to compare its elements."""
    return str(item.dtype), item.shape


def item_with(key: Any) -> Read:
    """Read the member with a key or at a position."""
    return lambda owner: item_of(owner, key)


def value_at(number: int) -> Read:
    """Read the value at a position of a dictionary, whose keys may have code of the user's in `__hash__`."""
    return lambda owner: contents(owner)[number][1]


def attribute(name: str) -> Read:
    """Read an attribute as it is kept, of an object or a class."""
    return lambda owner: attributes_of(owner)[name]


def attribute_or_none(name: str) -> Read:
    """Read an attribute that an object may lack."""
    return lambda owner: attributes_of(owner).get(name, MISSING)


def variable(name: str) -> Read:
    """Read a variable of the environment, which may not be set."""
    return lambda environment: environment.get(name, MISSING)


def slot(descriptor: Any, cls: type) -> Read:
    """Read what an object has in a slot."""
    return lambda owner: descriptor.__get__(owner, cls)


def in_table(table: str, name: str) -> Read:
    """Read a parameter, buffer or module of a module."""
    return lambda owner: owner.__dict__[table][name]


def part(name: str) -> Read:
    """Read an attribute of one of Python's own objects, which runs no code of the user's."""
    return lambda owner: getattr(owner, name)


def cell(number: int) -> Read:
    """Read a variable that a function closes over."""
    return lambda function: function.__closure__[number].cell_contents


def default(number: int) -> Read:
    """Read the default of an argument."""
    return lambda function: function.__defaults__[number]


def keyword_default(name: str) -> Read:
    """Read the default of an argument that is given by name."""
    return lambda function: function.__kwdefaults__[name]


def argument(number: int) -> Read:
    """Read an argument that a `partial` keeps."""
    return lambda item: item.args[number]


def keyword_argument(name: str) -> Read:
    """Read an argument that a `partial` keeps by name."""
    return lambda item: item.keywords[name]


def named(way: Way, state: Mapping[str, Any], names: Container[str]) -> list[Way]:
    """List the ways to those entries of an object's attributes that have one of some names."""
    return [
        Way(state[name], f"{way.path}.{name}", attribute(name))
        for name in sorted(name for name in state if name in names)
    ]
