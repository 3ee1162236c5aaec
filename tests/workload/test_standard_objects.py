"""Changes of what Python's own objects hold, and of what users' classes do, are seen: the next step is planned anew."""

from __future__ import annotations

import collections
import configparser
import contextlib
import ctypes
import datetime
import decimal
import fractions
import functools
import io
import logging
import mmap
import multiprocessing
import pathlib
import queue
import re
import threading
import types
import uuid
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import polars
import pytest
import torch
from torch import nn

from stowage.stages.workload.executed import executed
from stowage.stages.workload.reach import watch
from stowage.stages.workload.surroundings import Surroundings, same_values

Case = tuple[Callable[[], Any], Callable[[], Any]]


class Pair(ctypes.Structure):
    """A structure of C."""

    _fields_ = (("scale", ctypes.c_double), ("other", ctypes.c_double))


class Key:
    """Something to find by."""


_key = Key()


class Number(float):
    """A number with a name."""


class Waiting(queue.Queue[float]):
    """A queue of the user's."""


def found(get: Callable[[], Any]) -> Surroundings:
    with executed() as ran:
        get()
    return watch({"loss": get}, ran)


def assert_seen(get: Callable[[], Any], change: Callable[[], Any]) -> None:
    before = get()
    around = found(get)
    known = around.values()
    assert same_values(around.values(), known), "nothing has changed yet"
    change()
    assert get() != before, "the case changes something"
    assert not same_values(around.values(), known)


def kept(make: Callable[[], Any], get: Callable[[Any], Any], change: Callable[[Any], Any]) -> Case:
    """Return a case in which an object that is kept in a variable is changed."""
    held = make()
    return lambda: get(held), lambda: change(held)


def replaced(one: Any, other: Any, get: Callable[[Any], Any] = float) -> Case:
    """Return a case in which an attribute is another object of the same class."""
    holder = SimpleNamespace(value=one)
    return lambda: get(holder.value), lambda: setattr(holder, "value", other)


def settings() -> configparser.ConfigParser:
    made = configparser.ConfigParser()
    made["train"] = {"scale": "2.0"}
    return made


def filled(made: Any) -> Any:
    made.put(2.0)
    return made


CHANGED: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "value of processes": (
        lambda: multiprocessing.Value("d", 2.0), lambda v: v.value, lambda v: setattr(v, "value", 0.5),
    ),
    "array of processes": (
        lambda: multiprocessing.Array("d", [2.0]), lambda v: v[0], lambda v: v.__setitem__(0, 0.5),
    ),
    "array of C": (lambda: (ctypes.c_double * 2)(2.0), lambda v: v[0], lambda v: v.__setitem__(0, 0.5)),
    "structure of C": (lambda: Pair(2.0, 1.0), lambda v: v.scale, lambda v: setattr(v, "scale", 0.5)),
    "event": (threading.Event, lambda e: e.is_set(), lambda e: e.set()),
    "semaphore": (lambda: threading.Semaphore(2), lambda s: s._value, lambda s: s.acquire()),
    "queue": (lambda: filled(queue.Queue()), lambda q: q.queue[0], lambda q: q.queue.__setitem__(0, 0.5)),
    "queue of the user's": (lambda: filled(Waiting()), lambda q: q.qsize(), lambda q: q.put(0.5)),
    "heap": (lambda: filled(queue.PriorityQueue()), lambda q: q.queue[0], lambda q: q.put(0.5)),
    "file of bytes": (
        lambda: io.BytesIO(b"\x02"), lambda f: f.getvalue()[0], lambda f: f.getbuffer().__setitem__(0, 3),
    ),
    "file of text": (lambda: io.StringIO("2"), lambda f: f.getvalue(), lambda f: f.write("3")),
    "settings": (settings, lambda c: c["train"]["scale"], lambda c: c["train"].__setitem__("scale", "0.5")),
    "view of memory": (lambda: memoryview(bytearray([2])), lambda m: m[0], lambda m: m.__setitem__(0, 3)),
    "shared memory": (lambda: mmap.mmap(-1, 8), lambda m: m[0], lambda m: m.__setitem__(0, 3)),
    "weak values": (weakref.WeakValueDictionary, lambda m: len(m), lambda m: m.__setitem__("a", _key)),
    "weak keys": (
        lambda: weakref.WeakKeyDictionary({_key: 2.0}), lambda m: m[_key], lambda m: m.__setitem__(_key, 0.5),
    ),
    "chain of dictionaries": (
        lambda: collections.ChainMap({}, {"a": 2.0}), lambda m: m["a"], lambda m: m.__setitem__("a", 0.5),
    ),
    "bound method": (lambda: [2.0].__getitem__, lambda m: m(0), lambda m: m.__self__.__setitem__(0, 0.5)),
    "bound method of a dictionary": (
        lambda: {"a": 2.0}.get, lambda m: m("a"), lambda m: m.__self__.__setitem__("a", 0.5),
    ),
    "key of two parts": (lambda: {("a", 1): 2.0}, lambda d: d["a", 1], lambda d: d.__setitem__(("a", 1), 0.5)),
    "key with code": (lambda: {_key: 2.0}, lambda d: d[_key], lambda d: d.__setitem__(_key, 0.5)),
    "order of keys": (
        lambda: collections.OrderedDict(a=2.0, b=0.5), lambda d: [*d.values()], lambda d: d.move_to_end("a"),
    ),
    "order of keys of a dictionary": (
        lambda: {"a": 2.0, "b": 0.5}, lambda d: [*d.values()], lambda d: d.__setitem__("a", d.pop("a")),
    ),
    "set of objects": (lambda: {_key}, lambda s: _key in s, lambda s: s.clear()),
}  # fmt: skip

REPLACED: dict[str, tuple[Any, ...]] = {
    "decimal": (decimal.Decimal(2), decimal.Decimal("0.5")),
    "fraction": (fractions.Fraction(2), fractions.Fraction(1, 2)),
    "time": (datetime.timedelta(2), datetime.timedelta(1), lambda t: t.total_seconds()),
    "path": (pathlib.PurePath("a"), pathlib.PurePath("b"), lambda p: p.name),
    "identifier": (uuid.UUID(int=2), uuid.UUID(int=3), lambda u: u.int),
    "pattern": (re.compile("a"), re.compile("b"), lambda p: p.match("a") is None),
    "subclass of float": (Number(2.0), Number(0.5)),
    "built-in function": (max, min, lambda f: f(2.0, 0.5)),
    "function of PyTorch": (torch.relu, torch.neg, lambda f: f(torch.tensor(2.0)).item()),
    "class": (float, int, lambda c: c(2.5)),
    "module of Python": (io, re, lambda m: m.__name__),
    "table of a package": (polars.DataFrame({"a": [2.0]}), polars.DataFrame({"a": [0.5]}), lambda t: t["a"][0]),
}


def closures() -> Iterator[tuple[str, Callable[[], Any], list[float]]]:
    """Yield how code that nothing names in the step reads a variable."""
    k = [2.0]

    class Reads:
        @property
        def a_property(self) -> float:
            return k[0]

        @classmethod
        def a_class_method(cls) -> float:
            return k[0]

        @staticmethod
        def a_static_method(by_default: list[float] = k) -> float:
            return by_default[0]

        @functools.cached_property
        def a_cached_property(self) -> float:
            return k[0]

        def _given(self, given: list[float]) -> float:
            return given[0]

        a_partial_method = functools.partialmethod(_given, k)

        def __call__(self) -> float:
            return k[0]

        def __getattr__(self, name: str) -> float:
            return k[0]

        def __getitem__(self, number: int) -> float:
            return k[number]

        def __float__(self) -> float:
            return k[0]

        def __enter__(self) -> float:
            return k[0]

        def __exit__(self, *_: Any) -> None: ...

    def entered() -> float:
        with reads as value:
            return value

    @contextlib.contextmanager
    def manager() -> Iterator[float]:
        yield k[0]

    def managed() -> float:
        with manager() as value:
            return value

    @functools.singledispatch
    def dispatched(_: Any) -> float:
        return k[0]

    @functools.lru_cache
    def cached(_: float) -> float:
        return k[0]

    reads = Reads()
    yield "property", lambda: reads.a_property, k
    yield "class method", lambda: reads.a_class_method(), k
    yield "static method", lambda: reads.a_static_method(), k
    yield "cached property", lambda: Reads().a_cached_property, k
    yield "partial method", lambda: reads.a_partial_method(), k
    yield "call", lambda: reads(), k
    yield "missing attribute", lambda: reads.nothing_like_it, k
    yield "item", lambda: reads[0], k
    yield "number", lambda: float(reads), k  # type: ignore[arg-type]
    yield "context", entered, k
    yield "generator", managed, k
    yield "dispatched", lambda: dispatched(1), k
    yield "cached", lambda: cached(k[0]), k


@pytest.mark.parametrize("case", CHANGED)
@pytest.mark.parametrize("where", ["a variable", "an attribute", "a list"])
def test_what_an_object_holds(case: str, where: str) -> None:
    make, get, change = CHANGED[case]
    held = make()
    holder = SimpleNamespace(held=held)
    listed = [held]
    getters: dict[str, Callable[[], Any]] = {
        "a variable": lambda: get(held),
        "an attribute": lambda: get(holder.held),
        "a list": lambda: get(listed[0]),
    }
    assert_seen(getters[where], lambda: change(held))


@pytest.mark.parametrize("case", REPLACED)
def test_another_object_of_the_same_class(case: str) -> None:
    assert_seen(*replaced(*REPLACED[case]))


@pytest.mark.parametrize("case", [name for name, _, _ in closures()])
def test_variables_of_code_that_nothing_names(case: str) -> None:
    get, variable = next((get, variable) for name, get, variable in closures() if name == case)
    assert_seen(get, lambda: variable.__setitem__(0, 0.5))


def test_views_of_a_dictionary() -> None:
    behind = {"a": 2.0}
    for view in (behind.values(), behind.items()):
        assert_seen(lambda view=view: [*view], lambda: behind.update(a=behind["a"] + 1))  # type: ignore[misc]
    keys = behind.keys()
    assert_seen(lambda: [*keys], lambda: behind.update(b=1.0))


def test_a_method_that_is_replaced() -> None:
    class Scale:
        def scale(self) -> float:
            return 2.0

    class Doubles(nn.Module):
        def forward(self, x: float) -> float:
            return x * 2.0

    scale, doubles = Scale(), Doubles()
    assert_seen(lambda: scale.scale(), lambda: setattr(Scale, "scale", lambda self: 0.5))
    assert_seen(lambda: scale.scale(), lambda: setattr(scale, "scale", lambda: 0.25))
    assert_seen(lambda: doubles(1.0), lambda: setattr(Doubles, "forward", lambda self, x: x))


def test_loggers_and_locks_are_left_alone() -> None:
    """What a log or a lock keeps for itself is no input of a step."""

    class Remembers(logging.Handler):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[str] = []

        def emit(self, record: logging.LogRecord) -> None:
            self.seen.append(record.getMessage())

    log, lock, condition = logging.Logger("of a test"), threading.RLock(), threading.Condition()
    log.addHandler(Remembers())

    def get() -> float:
        with lock, condition:
            log.warning("called")
            return 2.0

    around = found(get)
    known = around.values()
    get()
    log.setLevel(logging.ERROR)
    get()
    assert same_values(around.values(), known)


def test_no_code_of_the_users_runs() -> None:
    """Keys with `__hash__`, numbers with `__float__`, proxies of modules: none is asked."""

    class Loud(float):
        def __pos__(self) -> float:
            raise AssertionError("asked")

        __float__ = __hash__ = __eq__ = __pos__  # type: ignore[assignment]

    class Hashed:
        asked = 0

        def __hash__(self) -> int:
            type(self).asked += 1
            return 1

    number, table, module = Loud(2.0), {Hashed(): [2.0]}, types.ModuleType("made")
    module.number = number  # type: ignore[attr-defined]
    asked = Hashed.asked

    def get() -> float:
        return next(iter(table.values()))[0] + len([number, module.number])

    around = found(get)
    known = around.values()
    next(iter(table.values()))[0] = 0.5
    assert not same_values(around.values(), known)
    assert Hashed.asked == asked
