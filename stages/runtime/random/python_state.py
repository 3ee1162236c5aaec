"""Remembers what Python objects refer to before a forward, so that a forward that changes them can be undone.

From the model and from its loss everything is followed that a forward usually writes: attributes, plain containers,
variables of enclosing functions, globals that their code names, generators. Contents of tensors are not looked at.
"""

from __future__ import annotations

import functools
import random
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

AT_MOST = 20_000
"""Objects that are followed at most: a step that refers to a data set is not followed into its rows."""

LONG = 4096
"""Length from which on a container itself is remembered, but its entries are not followed."""

_LIBRARIES = frozenset(
    {"torch", "numpy", "pyarrow", "datasets", "pandas", "tokenizers", "safetensors", "stowage"}
    | sys.stdlib_module_names
)
_FOLLOWED_ANYWAY = (types.SimpleNamespace,)
_PLAIN = (bool, int, float, complex, str, bytes, type(None), range, slice, torch.Tensor, np.ndarray)
_GENERATORS: dict[type, tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]] = {
    random.Random: (lambda g: g.getstate(), lambda g, state: g.setstate(state)),
    np.random.RandomState: (lambda g: g.get_state(), lambda g, state: g.set_state(state)),
    np.random.Generator: (
        lambda g: g.bit_generator.state,
        lambda g, state: setattr(g.bit_generator, "state", state),
    ),
    torch.Generator: (lambda g: g.get_state(), lambda g, state: g.set_state(state)),
}


class PythonState:
    """References at one moment; `restore` puts them back."""

    def __init__(self, roots: Iterable[Any]) -> None:
        self._seen: dict[int, Any] = {}
        self._undo: list[Callable[[], None]] = []
        self._waiting: deque[Any] = deque(roots)
        while self._waiting and len(self._seen) < AT_MOST:
            self._visit(self._waiting.popleft())
        self._waiting.clear()

    def restore(self) -> None:
        """Put everything that was followed back as it was."""
        for undo in self._undo:
            undo()

    def _visit(self, item: Any) -> None:
        if _trains(item):
            self._keep_tensor(item)
        if isinstance(item, _PLAIN) or id(item) in self._seen:
            return
        self._seen[id(item)] = item
        if isinstance(item, dict):
            self._keep_dict(item)
        elif isinstance(item, list):
            self._keep_list(item)
        elif isinstance(item, (set, deque)):
            self._keep_collection(item)
        elif isinstance(item, (tuple, frozenset)):
            self._follow(item)
        elif isinstance(item, types.FunctionType):
            self._keep_function(item)
        elif isinstance(item, types.MethodType):
            self._follow((item.__self__, item.__func__))
        elif isinstance(item, partial):
            self._follow((item.func, item.args, item.keywords, item.__dict__))
        elif isinstance(item, tuple(_GENERATORS)):
            self._keep_generator(item)
        elif isinstance(item, type):
            self._keep_class(item)
        elif isinstance(item, nn.Module) or not _of_a_library(type(item)) or isinstance(item, _FOLLOWED_ANYWAY):
            self._keep_object(item)

    def _follow(self, items: Iterable[Any]) -> None:
        self._waiting.extend(item for item in items if _trains(item) or not isinstance(item, _PLAIN))

    def _keep_dict(self, held: dict[Any, Any]) -> None:
        before = list(held.items())
        self._undo.append(lambda: _restore_dict(held, before))
        if len(before) < LONG:
            self._follow(value for _, value in before)

    def _keep_list(self, held: list[Any]) -> None:
        before = list(held)

        def undo() -> None:
            if len(held) != len(before) or any(a is not b for a, b in zip(held, before)):
                held[:] = before

        self._undo.append(undo)
        if len(before) < LONG:
            self._follow(before)

    def _keep_collection(self, held: set[Any] | deque[Any]) -> None:
        before = list(held)

        def undo() -> None:
            now = list(held)
            if len(now) != len(before) or any(a is not b for a, b in zip(now, before)):
                held.clear()
                if isinstance(held, set):
                    held.update(before)
                else:
                    held.extend(before)

        self._undo.append(undo)

    def _keep_function(self, function: types.FunctionType) -> None:
        for cell in function.__closure__ or ():
            try:
                before = cell.cell_contents
            except ValueError:  # an empty cell
                continue
            self._undo.append(partial(_restore_cell, cell, before))
            self._follow((before,))
        self._follow((function.__defaults__ or (), function.__kwdefaults__ or {}, function.__dict__))
        if _is_installed((function.__module__ or "").partition(".")[0]):
            return
        held = function.__globals__
        for name in _names_of(function.__code__):
            if name in held and not isinstance(held[name], types.ModuleType):
                before = held[name]
                self._undo.append(partial(_restore_entry, held, name, before))
                self._follow((before,))

    def _keep_class(self, held: type) -> None:
        """Remember numbers and containers that a user's class has for all its objects, and its functions' globals."""
        if _is_installed(held.__module__.partition(".")[0]):
            return
        for name, value in list(vars(held).items()):
            if isinstance(value, (staticmethod, classmethod)):
                value = value.__func__
            if isinstance(value, property):
                self._follow((value.fget,))
            elif isinstance(value, types.FunctionType):
                self._follow((value,))
            elif isinstance(value, (bool, int, float, list, dict, set, torch.Tensor)) and not name.startswith("__"):
                self._undo.append(partial(_restore_class_entry, held, name, value))
                self._follow((value,))

    def _keep_object(self, held: Any) -> None:
        attributes = getattr(held, "__dict__", None)
        if isinstance(attributes, dict):
            self._visit(attributes)
        for kind in type(held).__mro__:
            if kind is not object:
                self._follow((kind,))
            slots = vars(kind).get("__slots__", ()) if not _of_a_library(kind) else ()
            for name in (slots,) if isinstance(slots, str) else slots:
                if hasattr(held, name) and name not in ("__dict__", "__weakref__"):
                    value = getattr(held, name)
                    self._undo.append(partial(_restore_slot, held, name, value))
                    self._follow((value,))

    def _keep_generator(self, held: Any) -> None:
        take, put = next(found for kind, found in _GENERATORS.items() if isinstance(held, kind))
        before = take(held)
        self._undo.append(lambda: put(held, before))

    def _keep_tensor(self, held: torch.Tensor) -> None:
        if id(held) in self._seen:
            return
        self._seen[id(held)] = held
        data, grad, requires = held.data, held.grad, held.requires_grad

        def undo() -> None:
            if held.untyped_storage()._cdata != data.untyped_storage()._cdata:
                held.data = data
            if held.grad is not grad:
                held.grad = grad
            if held.requires_grad != requires:
                held.requires_grad_(requires)

        self._undo.append(undo)


def _trains(item: Any) -> bool:
    """Return whether an item is a tensor that may get a gradient, or whose content may be replaced."""
    return isinstance(item, nn.Parameter) or (isinstance(item, torch.Tensor) and item.is_leaf and item.requires_grad)


def _of_a_library_module(name: str | None) -> bool:
    return (name or "").partition(".")[0] in _LIBRARIES


@functools.cache
def _is_installed(package: str) -> bool:
    """Return whether a package was installed, rather than written by the user: its globals are not followed."""
    file = getattr(sys.modules.get(package), "__file__", None) or ""
    return package in _LIBRARIES or "site-packages" in file or "dist-packages" in file


def _of_a_library(kind: type) -> bool:
    return _of_a_library_module(kind.__module__)


def _names_of(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_of(constant)


def _restore_dict(held: dict[Any, Any], before: list[tuple[Any, Any]]) -> None:
    now = list(held.items())
    if len(now) == len(before) and all(a[0] is b[0] and a[1] is b[1] for a, b in zip(now, before)):
        return
    kind: Any = OrderedDict if isinstance(held, OrderedDict) else dict
    kind.clear(held)
    for key, value in before:
        kind.__setitem__(held, key, value)


def _restore_cell(cell: types.CellType, before: Any) -> None:
    try:
        if cell.cell_contents is before:
            return
    except ValueError:
        pass
    cell.cell_contents = before


def _restore_entry(held: dict[str, Any], name: str, before: Any) -> None:
    if held.get(name) is not before:
        held[name] = before


def _restore_class_entry(held: type, name: str, before: Any) -> None:
    if vars(held).get(name) is not before:
        setattr(held, name, before)


def _restore_slot(held: Any, name: str, before: Any) -> None:
    if getattr(held, name, None) is not before:
        object.__setattr__(held, name, before)
