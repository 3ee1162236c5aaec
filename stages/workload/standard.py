"""What Python's own objects hold: those that are no containers, and whose attributes only Python's own code reads.

A number may be kept in a `threading.Event`, a `multiprocessing.Value`, a queue, a parser of settings, or behind a view
or a bound method of a dictionary. Of objects written in Python the attributes are followed that code of Python's own
library mentions which ran in the step; of those written in C there is a way to what they hold.
"""

from __future__ import annotations

import array
import contextvars
import ctypes
import functools
import io
import mmap
import sys
import types
import weakref
from collections.abc import Container, Iterator
from typing import Any

import numpy as np

from stowage.stages.structure.kinds import attributes, is_of, kind_of, slots_of
from stowage.stages.workload.surroundings import MISSING, Look, Read
from stowage.stages.workload.ways import Way, argument, attribute, itself, keyword_argument, part, slot

LONGEST = 1 << 16
"""The most bytes of an object whose content is compared."""

_EMPTY: dict[Any, Any] = {}
_KEYS, _VALUES, _ITEMS = type(_EMPTY.keys()), type(_EMPTY.values()), type(_EMPTY.items())
_BOUND = (types.BuiltinMethodType, types.MethodWrapperType)
_Cached: Any = type(functools.lru_cache(lambda: None))

_HELD: dict[Any, tuple[str, Read]] = {
    contextvars.ContextVar: ("", lambda variable: variable.get(MISSING)),
    weakref.ref: ("()", lambda reference: reference()),
    types.MappingProxyType: ("", dict),
    _KEYS: ("", part("mapping")),
    _VALUES: ("", part("mapping")),
    _ITEMS: ("", part("mapping")),
    ctypes._SimpleCData: (".value", part("value")),
    types.MethodType: ("", part("__self__")),
    types.BuiltinMethodType: ("", part("__self__")),
    types.MethodWrapperType: ("", part("__self__")),
    property: ("", part("fget")),
    functools.partial: ("", part("func")),
    functools.partialmethod: ("", part("func")),
    functools.cached_property: ("", part("func")),
    _Cached: ("", part("__wrapped__")),
    staticmethod: ("", part("__func__")),
    classmethod: ("", part("__func__")),
}
"""What objects hold: class -> what is added to the path, and how it is read."""


def _content(item: Any) -> Any:
    content = memoryview(item)
    return content.nbytes if content.nbytes > LONGEST else (content.format, content.shape, content.tobytes())


_LOOKS: dict[type, Look] = {
    array.array: _content,
    bytearray: _content,
    memoryview: _content,
    mmap.mmap: _content,
    ctypes.Array: _content,
    ctypes.Structure: _content,
    ctypes.Union: _content,
    io.BytesIO: lambda file: (file.tell(), _content(file.getbuffer())),
    io.StringIO: lambda file: (file.tell(), file.getvalue()),
}
_NO_DATA = ("abc", "asyncio", "concurrent", "logging", "socket", "ssl", "subprocess", "unittest", "warnings")
_NUMBERS_AND_TEXT: dict[type, Look] = {
    int: int.__pos__,
    float: float.__pos__,
    complex: complex.__pos__,
    str: lambda text: str.__getitem__(text, slice(None)),
    bytes: lambda text: bytes.__getitem__(text, slice(None)),
}


def look_of(item: Any) -> Look | None:
    """Return how the value of an object is compared that has no parts: of a buffer, a date, a path; None for others."""
    cls = type(item)
    for holder, look in _LOOKS.items():
        if issubclass(cls, holder):
            return look
    hashed: Any = cls.__hash__  # None for a class whose objects can change
    by_value = hashed is not None and hashed is not object.__hash__
    return itself if by_value and kind_of(cls) == "closed" else None


def plain_value(item: Any) -> Look | None:
    """Return how the number or text is compared that an object of a subclass is; None for other objects."""
    if is_of(item, np.generic):
        return None
    return next((look for kind, look in _NUMBERS_AND_TEXT.items() if is_of(item, kind)), None)


def is_standard(cls: type) -> bool:
    """Say whether a class is part of Python, and its objects may hold data: not loggers, not sockets."""
    package = cls.__module__.partition(".")[0]
    return package in sys.stdlib_module_names and package not in _NO_DATA and cls is not object


def held(way: Way) -> Iterator[Way] | None:
    """Return the ways to what one of Python's own objects stands for; None where it stands for nothing."""
    if is_of(way.item, _BOUND) and is_of(way.item.__self__, (types.ModuleType, type, type(None))):
        return None  # a function of a module
    for holder, (suffix, read) in _HELD.items():
        if is_of(way.item, holder):
            return _held(way, suffix, read)
    return None


def _held(way: Way, suffix: str, read: Read) -> Iterator[Way]:
    item = way.item
    try:
        content = read(item)
    except AttributeError:  # a cached function that was written in C
        return
    yield Way(content, way.path + suffix, read)
    if is_of(item, types.MethodType):
        yield Way(item.__func__, f"{way.path}()", part("__func__"))
    elif is_of(item, (functools.partial, functools.partialmethod)):
        for number, value in enumerate(item.args):
            yield Way(value, f"{way.path}.args[{number}]", argument(number))
        for name, value in item.keywords.items():
            yield Way(value, f"{way.path}.{name}", keyword_argument(name))


def kept(way: Way, names: Container[str]) -> Iterator[Way]:
    """Yield the ways to those attributes of one of Python's own objects that have one of some names."""
    slots = dict(slots_of(type(way.item)))
    for name, value in attributes(way.item):
        if name in names:
            read = slot(slots[name], type(way.item)) if name in slots else attribute(name)
            yield Way(value, f"{way.path}.{name}", read)
