"""Remembers what Python objects refer to before a forward, so that a forward that changes them can be undone.

From the model and from its loss everything is followed that a forward usually writes: attributes, plain containers,
variables of enclosing functions, globals that their code names, also in modules, classes, generators. Contents of
tensors are not looked at.
"""

from __future__ import annotations

import functools
import sys
import threading
import types
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from stowage.stages.structure.code import in_module, is_made, names_in, parts_of_class, stored_globals
from stowage.stages.structure.containers import CHANGEABLE, contents, put_back
from stowage.stages.structure.kinds import UNSET, dict_of, in_slot, is_of, set_slot, slots_of
from stowage.stages.structure.memory import Memory, give_back, memory_of, taken

_MISSING = UNSET

AT_MOST = 20_000
"""Objects that are followed at most: a step that refers to a data set is not followed into its rows."""

LONG = 4096
"""Length from which on a container itself is remembered, but its entries are not followed."""

_LIBRARIES = frozenset(
    {"torch", "numpy", "pyarrow", "datasets", "pandas", "tokenizers", "safetensors", "stowage"}
    | sys.stdlib_module_names
)
_FOLLOWED_ANYWAY = (types.SimpleNamespace, threading.local)
_PLAIN = (bool, int, float, complex, str, bytes, type(None), range, slice, torch.Tensor, np.generic)


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
        kind = type(item)
        if issubclass(kind, _PLAIN) or id(item) in self._seen:
            return
        self._seen[id(item)] = item
        if issubclass(kind, CHANGEABLE):
            self._keep_container(item)
        elif issubclass(kind, (tuple, frozenset)):
            self._follow(contents(item))
        elif kind is types.FunctionType:
            self._keep_function(item)
        elif kind is types.MethodType:
            self._follow((item.__self__, item.__func__))
        elif issubclass(kind, partial):
            self._follow((item.func, item.args, item.keywords, dict_of(item)))
        elif (memory := memory_of(item)) is not None:
            self._keep_memory(item, memory)
        elif issubclass(kind, type):
            self._keep_class(item)
        elif kind is functools._lru_cache_wrapper:  # what it keeps is what it would compute again
            self._follow((item.__wrapped__,))
        elif issubclass(kind, (nn.Module, *_FOLLOWED_ANYWAY)) or is_made(item) or not _of_a_library(kind):
            self._keep_object(item)

    def _follow(self, items: Iterable[Any]) -> None:
        self._waiting.extend(item for item in items if _trains(item) or not is_of(item, _PLAIN))

    def _keep_container(self, held: Any) -> None:
        before = contents(held)
        self._undo.append(partial(put_back, held, before))
        if len(before) < LONG and not is_of(held, (set, deque)):
            self._follow((value for _, value in before) if is_of(held, dict) else before)

    def _keep_function(self, function: types.FunctionType) -> None:
        names = names_in(function.__code__)
        for cell in function.__closure__ or ():
            try:
                before = cell.cell_contents
            except ValueError:  # an empty cell
                continue
            self._undo.append(partial(_restore_cell, cell, before))
            self._look_into(before, names)
        self._follow((function.__defaults__ or (), function.__kwdefaults__ or {}, function.__dict__))
        if _is_installed((function.__module__ or "").partition(".")[0]):
            return
        held = function.__globals__
        for name in (names & held.keys()) | stored_globals(function.__code__):
            before = held.get(name, _MISSING)
            self._undo.append(partial(_restore_entry, held, name, before))
            self._look_into(before, names)

    def _look_into(self, item: Any, names: frozenset[str]) -> None:
        """Follow what a function knows; of a module what its code mentions of it."""
        if not is_of(item, types.ModuleType) or is_made(item):
            self._follow((item,))
            return
        for held, way, before in in_module(item, names):
            self._undo.append(partial(_restore_entry, held, way[-1], before))
            self._follow((before,))

    def _keep_class(self, held: type) -> None:
        """Remember what a user's class has for all its objects, and its functions' globals."""
        if _is_installed(held.__module__.partition(".")[0]):
            return
        self._undo.append(partial(_restore_class, held, dict(vars(held))))
        self._follow(value for _, value in parts_of_class(held))

    def _keep_object(self, held: Any) -> None:
        attributes = dict_of(held)
        if attributes is not None:
            self._visit(attributes)
        for kind in type(held).__mro__:
            if kind is not object:
                self._follow((kind,))
        for _, slot in slots_of(type(held)):
            value = in_slot(held, slot)
            self._undo.append(partial(set_slot, held, slot, value))
            self._follow((value,))

    def _keep_memory(self, held: Any, memory: Memory) -> None:
        before = taken(held, memory)
        if before is not None:
            self._undo.append(lambda: give_back(held, memory, before))

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
    if not is_of(item, torch.Tensor):
        return False
    return isinstance(item, nn.Parameter) or (item.is_leaf and item.requires_grad)


def _of_a_library_module(name: str | None) -> bool:
    return (name or "").partition(".")[0] in _LIBRARIES


@functools.cache
def _is_installed(package: str) -> bool:
    """Return whether a package was installed, rather than written by the user: its globals are not followed."""
    file = getattr(sys.modules.get(package), "__file__", None) or ""
    return package in _LIBRARIES or "site-packages" in file or "dist-packages" in file


def _of_a_library(kind: type) -> bool:
    return _of_a_library_module(kind.__module__)


def _restore_cell(cell: types.CellType, before: Any) -> None:
    try:
        if cell.cell_contents is before:
            return
    except ValueError:
        pass
    cell.cell_contents = before


def _restore_entry(held: dict[str, Any], name: str, before: Any) -> None:
    if before is _MISSING:
        held.pop(name, None)
    elif held.get(name) is not before:
        held[name] = before


def _restore_class(held: type, before: dict[str, Any]) -> None:
    for name in before.keys() | vars(held).keys():
        if name not in before:
            type.__delattr__(held, name)
        elif vars(held).get(name, _MISSING) is not before[name]:
            type.__setattr__(held, name, before[name])
