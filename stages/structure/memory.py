"""Takes and puts back what objects hold in memory of their own, where references show nothing of a change.

These are arrays of NumPy and of Python, buffers, numbers of C, generators of random numbers and context variables.
"""

from __future__ import annotations

import array
import contextvars
import ctypes
import mmap
import random
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

LARGEST = 1 << 24
"""The most bytes of an object whose content is saved; a data set in memory is larger, and no step changes it."""

_UNSET: Any = object()
_GLOBAL: Any = random.random.__self__  # type: ignore[attr-defined]
"""Python's global generator."""
_GENERATORS = (random.Random, np.random.RandomState, np.random.Generator, torch.Generator)


class Memory(NamedTuple):
    """How the memory of objects of one class is handled.

    Attributes:
        take: returns a copy of it; None where it is too large.
        put: makes it what the copy says.
        same: says whether two copies are equal.
    """

    take: Callable[[Any], Any]
    put: Callable[[Any, Any], None]
    same: Callable[[Any, Any], bool] = lambda one, other: bool(one == other)


def taken(item: Any, memory: Memory) -> Any:
    """Return a copy of an object's memory; None where it is too large, or is there no longer."""
    try:
        return memory.take(item)
    except ValueError:  # a view that was released, a mapping that was closed
        return None


def give_back(item: Any, memory: Memory, before: Any) -> None:
    """Make an object's memory what a copy says, unless it can no longer be written."""
    with suppress(ValueError, TypeError, BufferError, IndexError):
        memory.put(item, before)


def memory_of(item: Any) -> Memory | None:
    """Return how an object's memory is handled; None where it holds none, and for Python's global generator."""
    if item is _GLOBAL:
        return None
    cls = type(item)
    return next((memory for holder, memory in _MEMORIES.items() if issubclass(cls, holder)), None)


def is_generator(item: Any) -> bool:
    """Say whether an object draws random numbers."""
    return issubclass(type(item), _GENERATORS)


def _take_array(item: np.ndarray[Any, Any]) -> Any:
    of_records = item.dtype.hasobject and item.dtype != object
    if isinstance(item, np.memmap) or item.nbytes > LARGEST or of_records:
        return None
    return np.array(item, subok=False)


def _put_array(item: np.ndarray[Any, Any], before: Any) -> None:
    alike = item.shape == before.shape and item.dtype == before.dtype
    if alike and item.flags.writeable and not _same_array(item, before):
        np.copyto(item, before)


def _same_array(one: Any, other: Any) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.dtype.hasobject:
        return all(a is b for a, b in zip(one.ravel().tolist(), other.ravel().tolist()))
    return bool(np.ascontiguousarray(one).tobytes() == np.ascontiguousarray(other).tobytes())


def _take_sequence(item: Any) -> Any:
    return item[:] if len(item) * getattr(item, "itemsize", 1) <= LARGEST else None


def _put_sequence(item: Any, before: Any) -> None:
    if not _same_sequence(item, before):
        item[:] = before


def _same_sequence(one: Any, other: Any) -> bool:
    return bytes(memoryview(one)) == bytes(memoryview(other))


def _take_view(item: memoryview) -> Any:
    return item.tobytes() if item.nbytes <= LARGEST else None


def _put_view(item: memoryview, before: bytes) -> None:
    if not item.readonly and item.contiguous and len(item.format) == 1 and item.tobytes() != before:
        item.cast("B")[:] = before


def _take_of_c(item: Any) -> Any:
    """Take the bytes; what holds pointers is left alone, since what was behind them may be gone."""
    if ctypes.sizeof(item) > LARGEST or _has_pointers(type(item)):  # type: ignore[arg-type]
        return None
    return bytes(_bytes_of(item))


def _put_of_c(item: Any, before: bytes) -> None:
    now = _bytes_of(item)
    if bytes(now) != before:
        now[:] = before


@lru_cache(maxsize=1024)
def _has_pointers(cls: Any) -> bool:
    if issubclass(cls, ctypes.Array):
        return _has_pointers(cls._type_)
    if issubclass(cls, (ctypes.Structure, ctypes.Union)):
        return any(_has_pointers(field[1]) for base in cls.__mro__ for field in vars(base).get("_fields_", ()))
    return not issubclass(cls, ctypes._SimpleCData) or cls._type_ in "OPZz"


def _bytes_of(item: Any) -> memoryview:
    return memoryview((ctypes.c_char * ctypes.sizeof(item)).from_buffer(item)).cast("B")


def _take_variable(variable: contextvars.ContextVar[Any]) -> Any:
    try:
        return variable.get()
    except LookupError:  # it was never set, and has no default
        return _UNSET


def _put_variable(variable: contextvars.ContextVar[Any], before: Any) -> None:
    if before is not _UNSET and variable.get(_UNSET) is not before:
        variable.set(before)


_ANY_SEQUENCE = Memory(_take_sequence, _put_sequence, _same_sequence)
_OF_C = Memory(_take_of_c, _put_of_c)
_MEMORIES: dict[Any, Memory] = {
    np.ndarray: Memory(_take_array, _put_array, _same_array),
    bytearray: _ANY_SEQUENCE,
    array.array: _ANY_SEQUENCE,
    mmap.mmap: _ANY_SEQUENCE,
    memoryview: Memory(_take_view, _put_view),
    ctypes._SimpleCData: _OF_C,
    ctypes.Array: _OF_C,
    ctypes.Structure: _OF_C,
    ctypes.Union: _OF_C,
    contextvars.ContextVar: Memory(_take_variable, _put_variable, lambda one, other: one is other),
    random.Random: Memory(lambda g: g.getstate(), lambda g, state: g.setstate(state)),
    np.random.RandomState: Memory(
        lambda g: g.get_state(), lambda g, state: g.set_state(state), lambda one, other: str(one) == str(other)
    ),
    np.random.Generator: Memory(
        lambda g: g.bit_generator.state,
        lambda g, state: setattr(g.bit_generator, "state", state),
        lambda one, other: str(one) == str(other),
    ),
    torch.Generator: Memory(lambda g: g.get_state(), lambda g, state: g.set_state(state), torch.equal),
}
