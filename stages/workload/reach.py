"""Walks from what runs to everything that it can have read, without running any code of the user's."""

from __future__ import annotations

import array
import contextvars
import ctypes
import functools
import inspect
import sys
import types
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from stowage.stages.structure.containers import contents, item_of, length_of
from stowage.stages.structure.installed import is_installed
from stowage.stages.structure.kinds import attributes, attributes_of, dict_of, is_of, kind_of, slots_of
from stowage.stages.structure.values import value_text
from stowage.stages.workload.executed import Executed
from stowage.stages.workload.signature import module_rows, tensor_form
from stowage.stages.workload.surroundings import MISSING, Look, Read, SurroundingPlace, Surroundings

LIMIT = 20_000
"""The most objects that are visited; objects further from the roots are ignored."""
ITEMS = 256
"""The most items of a container that are all followed.

Of a longer dictionary only the keys that the code mentions are followed, of a longer sequence only the first items.
"""
SEPARATE = 32
"""The most plain values of a sequence that are places of their own; a longer one is one place."""
ELEMENTS = 4096
"""The most elements of an array whose content is compared."""
DEPTH = 24

_PARTS_OF_MODULES = frozenset(
    ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_forward_hooks", "_forward_pre_hooks",
     "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks", "_state_dict_pre_hooks",
     "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks", "_forward_hooks_with_kwargs",
     "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs", "_is_full_backward_hook", "training",
     "call_super_init"),
)  # fmt: skip


def watch(
    roots: Mapping[str, Any], ran: Executed, *, model: nn.Module | None = None, own: Sequence[Any] = ()
) -> Surroundings:
    """Find everything that the code that ran can have read, reachable from `roots` and from the globals of user code.

    Args:
        roots: name for people -> what runs: the model, the loss.
        ran: the code that ran.
        model: its parameters, buffers and plain attributes are skipped, since its signature has them.
        own: tensors and other objects to skip, since they are checked elsewhere.
    """
    reach = Reach(ran, model, own)
    for name, root in roots.items():
        if root is not None:
            reach.root(name, root)
    for module, (scope, names) in ran.globals.items():
        reach.scope(module, scope, names)
    reach.run()
    return Surroundings(reach.roots, *reach.leading_somewhere())


class _Way(NamedTuple):
    """Says how something is reached from its owner."""

    item: Any
    path: str
    read: Read


class Reach:
    """A breadth-first walk.

    Attributes:
        roots: the objects where it began.
        places: the places that it found; their owners are roots, counted first, or earlier places.
        tensors: path -> position and tensor.
    """

    def __init__(self, ran: Executed, model: nn.Module | None, own: Sequence[Any]) -> None:
        self.roots: list[Any] = []
        self.places: list[SurroundingPlace] = []
        self.tensors: dict[str, tuple[int, torch.Tensor]] = {}
        self._ran = ran
        self._inside = {id(module) for module in model.modules()} if model is not None else set()
        known = [*model.parameters(), *model.buffers()] if model is not None else []
        self._covered: set[int] = set()
        self._own = {id(item) for item in (*known, *own)}
        self._seen: dict[int, Any] = {}
        self._queue: deque[tuple[int, int, _Way, bool]] = deque()
        self._begin: list[tuple[int, _Way, bool]] = []

    def root(self, name: str, item: Any) -> None:
        """Begin at this object."""
        self.roots.append(item)
        self._begin.append((len(self.roots) - 1, _Way(item, name, _itself), True))

    def scope(self, module: str, scope: dict[str, Any], names: set[str]) -> None:
        """Begin at the globals of user code that the code mentions."""
        self.roots.append(scope)
        position = len(self.roots) - 1
        for name in sorted(names):
            if name in scope:
                self._begin.append((position, _Way(scope[name], f"{module}.{name}", _item(name)), False))

    def run(self) -> None:
        """Walk until nothing is left or the limit is reached."""
        self._queue.extend((owner, 0, way, root) for owner, way, root in self._begin)
        while self._queue and len(self._seen) < LIMIT:
            owner, depth, way, root = self._queue.popleft()
            self._visit(owner, depth, way, root)

    def leading_somewhere(self) -> tuple[list[SurroundingPlace], dict[str, tuple[int, torch.Tensor]]]:
        """Return the places that are compared or lead to one that is, and the tensors."""
        first = len(self.roots)
        needed = [place.look is not None for place in self.places]
        for number in reversed(range(len(self.places))):
            owner = self.places[number].owner - first
            if needed[number] and owner >= 0:
                needed[owner] = True
        number_of = {root: root for root in range(first)}
        kept: list[SurroundingPlace] = []
        for number, place in enumerate(self.places):
            if needed[number]:
                number_of[first + number] = first + len(kept)
                kept.append(place._replace(owner=number_of[place.owner]))
        return kept, {path: (number_of[position], tensor) for path, (position, tensor) in self.tensors.items()}

    def _add(self, owner: int, way: _Way, look: Look | None) -> int:
        self.places.append(SurroundingPlace(way.path, owner, way.read, look))
        return len(self.roots) + len(self.places) - 1

    def _follow(self, owner: int, way: _Way, depth: int, look: Look | None, ways: Iterator[_Way]) -> None:
        """Add a place and queue the parts behind it."""
        position = self._add(owner, way, look)
        if depth < DEPTH:
            self._queue.extend((position, depth + 1, further, False) for further in ways)

    def _visit(self, owner: int, depth: int, way: _Way, root: bool) -> None:
        item = way.item
        if item is MISSING:
            self._add(owner, way, _itself)
            return
        kind = kind_of(type(item))
        if id(item) in self._own:
            return
        if kind == "plain" or is_of(item, np.generic):
            if kind == "plain" and (is_of(item, (str, bytes)) and len(item) > ELEMENTS):
                return
            self._add(owner, way, _itself)
            return
        if id(item) in self._seen:
            self._add(owner, way, functools.partial(_is, item))
            return
        if kind == "tensor":
            self._seen[id(item)] = item
            self.tensors[way.path] = (self._add(owner, way, tensor_form), item)
            return
        if kind == "array":
            self._add(owner, way, value_text if item.size <= ELEMENTS else _form_of_array)
            return
        self._seen[id(item)] = item
        if kind in ("mapping", "sequence", "set"):
            self._container(owner, way, depth)
        elif is_of(item, nn.Module):
            self._module(owner, way, depth)
        elif is_of(item, types.FunctionType):
            if root or self._ran.ran(item.__code__) or not is_installed(item.__code__.co_filename):
                self._follow(owner, way, depth, _code, self._behind_function(way, root))
        elif is_of(item, (types.MethodType, functools.partial)):
            self._follow(owner, way, depth, None, _behind_callable(way))
        elif is_of(item, types.ModuleType):
            if _is_users_module(item):
                self._follow(owner, way, depth, None, self._named(way, vars(item), _attribute_of_dict))
        elif is_of(item, type):
            if _of_user(item):
                self._follow(owner, way, depth, None, self._behind_class(item, way.path))
        elif is_of(item, tuple(_INSIDE)):
            read = next(read for holder, read in _INSIDE.items() if is_of(item, holder))
            self._follow(owner, way, depth, None, iter([_Way(read(item), way.path, read)]))
        elif kind == "object":
            self._follow(owner, way, depth, type, self._behind_object(way))

    def _container(self, owner: int, way: _Way, depth: int) -> None:
        item, members = way.item, contents(way.item)
        mapping = is_of(item, dict)
        plain = [kind_of(type(value)) == "plain" for value in ([v for _, v in members] if mapping else members)]
        if is_of(item, (set, frozenset)):
            if all(plain) and len(plain) <= ELEMENTS:
                self._add(owner, way, _members)
            return
        if not mapping and len(plain) > SEPARATE and all(plain):
            self._add(owner, way, _values if len(plain) <= ELEMENTS else length_of)
            return
        few = len(plain) <= ITEMS
        if mapping:
            ways = (
                _Way(value, f"{way.path}[{key!r}]", _item(key))
                for key, value in members
                if (few and kind_of(type(key)) == "plain") or (is_of(key, str) and key in self._ran.names)
            )
        else:
            ways = (_Way(value, f"{way.path}[{n}]", _item(n)) for n, value in enumerate(members[:ITEMS]))
        self._follow(owner, way, depth, _type_and_length if few else None, ways)
        if type(item).__module__ not in ("builtins", "collections"):
            self._follow(owner, way, depth, None, self._behind_object(way))

    def _module(self, owner: int, way: _Way, depth: int) -> None:
        """Visit a module: inside the model only what is no plain attribute, elsewhere everything."""
        module: nn.Module = way.item
        if id(module) in self._inside:
            self._follow(owner, way, depth, None, self._behind_module(way, inside=True))
        else:
            look = None if id(module) in self._covered else module_rows
            self._covered.update(id(part) for part in module.modules())
            self._follow(owner, way, depth, look, self._behind_module(way, inside=False))

    def _behind_module(self, way: _Way, *, inside: bool) -> Iterator[_Way]:
        state = way.item.__dict__
        for name, value in tuple(state.items()):
            if name not in _PARTS_OF_MODULES and kind_of(type(value)) != "plain" and name in self._ran.names:
                yield _Way(value, f"{way.path}.{name}", _attribute_of_dict(name))
        for table in ("_modules",) if inside else ("_parameters", "_buffers", "_modules"):
            for name, value in tuple(state[table].items()):
                if value is not None:
                    yield _Way(value, f"{way.path}.{name}", _in_table(table, name))
        yield from self._behind_classes(way)

    def _behind_object(self, way: _Way) -> Iterator[_Way]:
        slots = dict(slots_of(type(way.item)))
        for name, value in attributes(way.item):
            if name in self._ran.names:
                read = _slot(slots[name], type(way.item)) if name in slots else _attribute_of_dict(name)
                yield _Way(value, f"{way.path}.{name}", read)
        yield from self._behind_classes(way)
        own = dict_of(way.item)
        if own is not None:
            for name in sorted({n for cls in type(way.item).__mro__ if _of_user(cls) for n in cls.__dict__}):
                if name in self._ran.names and name not in own:  # if it is set later, it hides the class's
                    yield _Way(MISSING, f"{way.path}.{name}", _attribute_or_none(name))

    def _behind_classes(self, way: _Way) -> Iterator[_Way]:
        """Yield an object's classes: their attributes are read where the object has none of that name."""
        for cls in type(way.item).__mro__:
            if _of_user(cls) and id(cls) not in self._seen:
                yield _Way(cls, _path_of(cls), functools.partial(_base, cls))

    def _behind_class(self, cls: type, path: str) -> Iterator[_Way]:
        for name, value in tuple(cls.__dict__.items()):
            function = inspect.unwrap(value) if isinstance(value, types.FunctionType) else value
            ran = isinstance(function, types.FunctionType) and self._ran.ran(function.__code__)  # PyTorch calls forward
            special = name.startswith("__") and name.endswith("__") and name != "__call__"
            if special or not (ran or name in self._ran.names):
                continue
            if isinstance(function, types.FunctionType) and not (function.__closure__ or function.__defaults__):
                continue
            if isinstance(value, (property, classmethod, staticmethod, types.MemberDescriptorType)):
                continue
            yield _Way(value, f"{path}.{name}", _attribute_of_dict(name))
        for base in cls.__bases__:
            if _of_user(base):
                yield _Way(base, _path_of(base), functools.partial(_base, base))

    def _behind_function(self, way: _Way, root: bool) -> Iterator[_Way]:
        function: types.FunctionType = way.item
        if not root and not self._ran.ran(function.__code__):
            return
        for number, (name, cell) in enumerate(zip(function.__code__.co_freevars, function.__closure__ or ())):
            try:
                content = cell.cell_contents
            except ValueError:  # not set yet
                continue
            yield _Way(content, f"{way.path}.{name}", functools.partial(_cell, number))
        arguments = function.__code__.co_varnames[: function.__code__.co_argcount]
        defaults = function.__defaults__ or ()
        for number, (name, value) in enumerate(zip(arguments[len(arguments) - len(defaults) :], defaults)):
            yield _Way(value, f"{way.path}.{name}", functools.partial(_default, number))
        for name, value in (function.__kwdefaults__ or {}).items():
            yield _Way(value, f"{way.path}.{name}", functools.partial(_keyword_default, name))
        for name, value in function.__dict__.items():
            if name in self._ran.names or name == "__wrapped__":
                yield _Way(value, f"{way.path}.{name}", _attribute_of_dict(name))

    def _named(self, way: _Way, state: Mapping[str, Any], read: Any) -> Iterator[_Way]:
        for name in sorted(self._ran.names & state.keys()):
            yield _Way(state[name], f"{way.path}.{name}", read(name))


def _of_user(cls: type) -> bool:
    module = sys.modules.get(cls.__module__)
    file = getattr(module, "__file__", None)
    if file is None:  # from an interactive session, or without a module
        return cls.__module__ == "__main__"
    return not is_installed(file)


def _is_users_module(module: types.ModuleType) -> bool:
    """Return whether the user wrote a module, or made it while the program ran."""
    scope = vars(module)
    if file := scope.get("__file__"):
        return not is_installed(file)
    of_python = str(scope.get("__name__")).partition(".")[0] in sys.stdlib_module_names
    return not of_python and (type(module) is types.ModuleType or _of_user(type(module)))


def _path_of(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _behind_callable(way: _Way) -> Iterator[_Way]:
    item = way.item
    if is_of(item, types.MethodType):
        yield _Way(item.__self__, way.path, _own_self)
        yield _Way(item.__func__, f"{way.path}()", _own_function)
        return
    yield _Way(item.func, way.path, lambda p: p.func)
    for number, value in enumerate(item.args):
        yield _Way(value, f"{way.path}.args[{number}]", functools.partial(_partial_argument, number))
    for name, value in item.keywords.items():
        yield _Way(value, f"{way.path}.{name}", functools.partial(_partial_keyword, name))


_INSIDE: dict[type, Read] = {
    contextvars.ContextVar: lambda variable: variable.get(MISSING),
    weakref.ref: lambda reference: reference(),
    types.MappingProxyType: dict,
    array.array: lambda numbers: (numbers.typecode, numbers.tobytes()),
    bytearray: bytes,
    ctypes._SimpleCData: lambda data: data.value,
}
"""What Python's own objects hold that are neither containers nor have attributes."""


def _itself(item: Any) -> Any:
    return item


def _is(known: Any, item: Any) -> bool:
    return item is known


def _base(cls: type, item: Any) -> type:
    return cls


def _code(item: Any) -> Any:
    return item.__code__


def _type_and_length(item: Any) -> tuple[type, int]:
    return type(item), length_of(item)


def _values(item: Any) -> tuple[Any, ...]:
    return tuple(contents(item))


def _members(item: Any) -> frozenset[Any]:
    return frozenset(contents(item))


def _form_of_array(item: Any) -> Any:
    return str(item.dtype), item.shape


def _item(key: Any) -> Read:
    return lambda owner: item_of(owner, key)


def _attribute_of_dict(name: str) -> Read:
    return lambda owner: attributes_of(owner)[name]


def _attribute_or_none(name: str) -> Read:
    return lambda owner: attributes_of(owner).get(name, MISSING)


def _slot(slot: Any, cls: type) -> Read:
    return lambda owner: slot.__get__(owner, cls)


def _in_table(table: str, name: str) -> Read:
    return lambda owner: owner.__dict__[table][name]


def _cell(number: int, function: Any) -> Any:
    return function.__closure__[number].cell_contents


def _default(number: int, function: Any) -> Any:
    return function.__defaults__[number]


def _keyword_default(name: str, function: Any) -> Any:
    return function.__kwdefaults__[name]


def _own_self(method: Any) -> Any:
    return method.__self__


def _own_function(method: Any) -> Any:
    return method.__func__


def _partial_argument(number: int, item: Any) -> Any:
    return item.args[number]


def _partial_keyword(name: str, item: Any) -> Any:
    return item.keywords[name]
