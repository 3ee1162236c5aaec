"""Takes a snapshot of the user's objects and of generators, and undoes whatever a trace changes in them."""

from __future__ import annotations

import collections
import functools
import random
import re
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from stowage.stages.structure.code import (
    in_module,
    is_foreign,
    is_library,
    is_made,
    names_in,
    of_foreign_package,
    parts_of_class,
    stored_globals,
)
from stowage.stages.structure.containers import contents, item_of, put_back, same_members
from stowage.stages.structure.kinds import UNSET, dict_of, in_slot, is_of, set_slot, slots_of
from stowage.stages.structure.memory import Memory, give_back, memory_of, taken
from stowage.stages.trace.objects.caches import Cached, Caches

MOST_OBJECTS = 50_000
"""The most objects that are visited; objects further from the roots are ignored."""

MOST_CODE = 50_000
"""The most that are visited besides, behind the classes of the former."""

MOST_CALLS = 3
"""How far the code of installed packages is followed: from a class to its methods, and to what those call."""

_OPAQUE = (
    types.ModuleType, types.BuiltinFunctionType, types.CodeType, torch.Tensor, str, bytes, int, float, complex, bool,
    type(None), torch.dtype, torch.device, torch.Generator, torch.Size,
)  # fmt: skip
_MISSING = UNSET

_TABLES = re.compile(r"\._(?:modules|buffers|parameters)\['([^']+)'\]")

_SCOPES = {"default": "__defaults__", "keyword": "__kwdefaults__", "global": "__globals__"}

Step = tuple[str, Any]
"""The kind of a step (`attribute`, `item`, `cell`, `default`, `keyword`, `global` or `module`), and what it leads to.

That is a name or position; for `module` the step to a module, and the names that lead on from there.
"""
_LONGEST = 64


class PreserveWay(NamedTuple):
    """A way through the user's objects.

    Attributes:
        root: the object where it begins.
        steps: the steps from there.
    """

    root: Any
    steps: tuple[Step, ...]

    def end(self) -> Any:
        """Return the object that is at the end now.

        Raises:
            LookupError, AttributeError, TypeError: the way no longer exists.
        """
        return functools.reduce(_behind, self.steps, self.root)

    def __str__(self) -> str:
        """Return the way as text, for people."""
        item = self.root
        text = item.__name__ if is_of(item, types.FunctionType) else type(item).__name__
        for step in self.steps:
            text += _text(item, step)
            try:
                item = _behind(item, step)
            except (LookupError, AttributeError, TypeError, ValueError):
                item = None
        return _TABLES.sub(r".\1", text).removesuffix("._buffers")


def _text(item: Any, step: Step) -> str:
    """Return the text of one step; of one into a module the names alone."""
    kind, which = step
    if kind == "module":
        return ".".join(["", str(which[0][1]), *which[1:]])
    if kind == "cell" and is_of(item, types.FunctionType):
        return f".{item.__code__.co_freevars[which]}"
    if kind == "default" and is_of(item, types.FunctionType):
        code = item.__code__
        return f".{code.co_varnames[code.co_argcount - len(item.__defaults__ or ()) + which]}"
    if kind == "item":
        return f"[{which!r}]"
    return "" if which == "__class__" else f".{which}"


def _behind(item: Any, step: Step) -> Any:
    kind, which = step
    if kind == "attribute":
        attributes = dict_of(item) or {}
        return attributes[which] if which in attributes else getattr(item, which)
    if kind == "item":
        return item_of(item, which)
    if kind == "cell":
        return item.__closure__[which].cell_contents
    if kind == "module":
        first, *names = which
        return functools.reduce(lambda module, name: vars(module)[name], names, _behind(item, first))
    return getattr(item, _SCOPES[kind])[which]


@dataclass(frozen=True)
class Change:
    """The change of one place.

    Attributes:
        holder: the module, object, dictionary, list or cell.
        key: the attribute, key or position; None for a list or set whose members are not the same; `Change.MEMORY` for
            what the holder keeps in memory of its own.
        old, new: what was there and is; `Change.MISSING` where nothing was or is.
    """

    holder: Any
    key: Any
    old: Any
    new: Any

    MISSING = _MISSING
    MEMORY: ClassVar[Any] = object()


class Snapshot:
    """References to everything that can be reached from some objects and be replaced: attributes, items, members.

    Memory of objects that are no tensors is saved too. Contents of tensors are not saved, since nothing that is traced
    changes them.
    """

    def __init__(self, roots: Mapping[str, Any]) -> None:
        self._mappings: list[tuple[Any, dict[Any, Any], dict[Any, Any]]] = []
        self._sequences: list[tuple[Any, list[Any]]] = []
        self._sets: list[tuple[Any, set[Any]]] = []
        self._cells: dict[int, tuple[types.CellType, Any]] = {}
        self._classes: list[tuple[type, dict[str, Any]]] = []
        self._slots: list[tuple[Any, str, Any, Any]] = []
        self._memories: list[tuple[Any, Memory, Any]] = []
        self._caches = Caches()
        self._globals: dict[tuple[int, str], tuple[dict[str, Any], str, Any]] = {}
        self._gradients: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        self._leaves: set[int] = set()
        self._contents: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._seen: set[int] = set()
        self._keep: list[Any] = []
        self._via: dict[int, tuple[Any, Step]] = {}
        self._walk(list(roots.values()))
        self._python = random.getstate()
        self._numpy = np.random.get_state(legacy=False)

    def _walk(self, waiting: list[Any]) -> None:
        """Visit the objects, then the classes that they have and the code in those."""
        queue, later = collections.deque((item, 0) for item in waiting), collections.deque[tuple[Any, int]]()
        for most in (MOST_OBJECTS, MOST_OBJECTS + MOST_CODE):
            while queue and len(self._seen) < most:
                item, calls = queue.popleft()
                calls += is_of(item, (type, types.FunctionType)) and is_library(item)
                if calls <= MOST_CALLS:
                    for part in self._visit(item):
                        (later if is_of(part, type) else queue).append((part, calls))
            queue, later = later, later

    def _visit(self, item: Any) -> Iterator[Any]:
        if id(item) in self._seen:
            return
        if is_of(item, torch.Tensor):
            self._seen.add(id(item))
            if item.is_leaf:
                self._gradients.append((item, item.grad))
                yield from (item._backward_hooks or {}).values()
            if not is_of(item, FakeTensor) and item.layout is torch.strided:  # others have no memory of their own
                self._contents.append((item, item.detach()))
                if item.is_leaf:
                    self._leaves.add(id(item))
            return
        if (is_of(item, _OPAQUE) and not is_made(item)) or (is_of(item, type) and is_foreign(item)):
            return
        self._seen.add(id(item))
        self._keep.append(item)
        if (memory := memory_of(item)) is not None and (content := taken(item, memory)) is not None:
            self._memories.append((item, memory, content))
            return
        for step, part in self._look(item):
            self._via.setdefault(id(part), (item, step))
            yield part

    def way_to(self, holder: Any) -> PreserveWay:
        """Return the way from one of the roots to a holder, by which a later replacement of it can be found."""
        steps: list[Step] = []
        while id(holder) in self._via and len(steps) < _LONGEST:
            holder, step = self._via[id(holder)]
            steps.append(step)
        return PreserveWay(holder, tuple(reversed(steps)))

    def _look(self, item: Any) -> Iterator[tuple[Step, Any]]:
        kind = type(item)
        if issubclass(kind, type):
            self._classes.append((item, dict(vars(item))))
            yield from ((("attribute", name), value) for name, value in parts_of_class(item))
            yield ("attribute", "__mro__"), item.__mro__
            return
        if kind is types.FunctionType:
            yield from self._function(item)
            return
        if kind is types.MethodType:
            yield from ((("attribute", name), getattr(item, name)) for name in ("__self__", "__func__"))
        elif issubclass(kind, functools.partial):
            yield from ((("attribute", name), getattr(item, name)) for name in ("func", "args", "keywords"))
        elif issubclass(kind, dict):
            self._mappings.append((item, item, dict(dict.items(item))))
            yield from ((("item", key), value) for key, value in dict.items(item))
        elif issubclass(kind, (list, collections.deque)):
            items = contents(item)
            self._sequences.append((item, items))
            yield from ((("item", i), value) for i, value in enumerate(items))
        elif issubclass(kind, set):
            self._sets.append((item, set(contents(item))))
        elif issubclass(kind, tuple):
            yield from ((("item", i), value) for i, value in enumerate(contents(item)))
        elif kind is Cached:
            self._caches.add(item)
        elif issubclass(kind, types.ModuleType):
            yield ("attribute", "__dict__"), vars(item)
            return
        if issubclass(kind, nn.Module) or not of_foreign_package(kind.__module__):
            attributes = dict_of(item)
            if attributes is not None:
                self._mappings.append((item, attributes, dict(attributes)))
                yield from ((("attribute", name), value) for name, value in attributes.items())
            for name, slot in slots_of(kind):
                value = in_slot(item, slot)
                self._slots.append((item, name, slot, value))
                yield ("attribute", name), value
            yield ("attribute", "__class__"), kind

    def _function(self, function: types.FunctionType) -> Iterator[tuple[Step, Any]]:
        if of_foreign_package(function.__module__):
            return
        for i, cell in enumerate(function.__closure__ or ()):
            try:
                content = cell.cell_contents
            except ValueError:
                continue
            self._cells[id(cell)] = cell, content
            yield from self._in_scope(function, ("cell", i), content)
        for i, default in enumerate(function.__defaults__ or ()):
            yield ("default", i), default
        for name, default in (function.__kwdefaults__ or {}).items():
            yield ("keyword", name), default
        self._mappings.append((function, function.__dict__, dict(function.__dict__)))
        yield from ((("attribute", name), value) for name, value in function.__dict__.items())
        scope = function.__globals__
        for name in (names_in(function.__code__) & scope.keys()) | stored_globals(function.__code__):
            value = scope.get(name, _MISSING)
            self._globals[id(scope), name] = scope, name, value
            yield from self._in_scope(function, ("global", name), value)

    def _in_scope(self, function: types.FunctionType, step: Step, value: Any) -> Iterator[tuple[Step, Any]]:
        """Yield something that a function's code has a name for; of a module what the code mentions of it."""
        if not is_of(value, types.ModuleType) or is_made(value):
            yield step, value
            return
        for scope, names, content in in_module(value, names_in(function.__code__)):
            self._globals[id(scope), names[-1]] = scope, names[-1], content
            yield ("module", (step, *names)), content

    def changes(self) -> list[Change]:
        """List what is not as it was, in any order."""
        found: list[Change] = []
        mappings = [*self._mappings, *((cls, vars(cls), before) for cls, before in self._classes)]
        for holder, now, before in mappings:
            held = dict(dict.items(now) if isinstance(now, dict) else now)
            for key in before.keys() | held.keys():
                old, new = before.get(key, _MISSING), held.get(key, _MISSING)
                if old is not new and not _equal(old, new):
                    found.append(Change(holder, key, old, new))
        for holder, old_items in self._sequences:
            if not same_members(items := contents(holder), old_items):
                found.append(Change(holder, None, old_items, items))
        found += [Change(h, None, old, members) for h, old in self._sets if (members := set(contents(h))) != old]
        found += [
            Change(cell, None, old, cell.cell_contents)
            for cell, old in self._cells.values()
            if cell.cell_contents is not old and not _equal(cell.cell_contents, old)
        ]
        found += [
            Change(holder, name, old, holder.get(name, _MISSING))
            for holder, name, old in self._globals.values()
            if holder.get(name, _MISSING) is not old and not _equal(holder.get(name, _MISSING), old)
        ]
        found += [
            Change(holder, name, old, new)
            for holder, name, slot, old in self._slots
            if (new := in_slot(holder, slot)) is not old and not _equal(new, old)
        ]
        found += [
            Change(tensor, "data", old, tensor)
            for tensor, old in self._contents
            if tensor.untyped_storage()._cdata != old.untyped_storage()._cdata
        ]
        found += [Change(t, "grad", old, t.grad) for t, old in self._gradients if t.grad is not old]
        found += [
            Change(holder, Change.MEMORY, old, now)
            for holder, memory, old in self._memories
            if (now := taken(holder, memory)) is not None and not memory.same(now, old)
        ]
        return list({(id(change.holder), change.key): change for change in found}.values())

    def generators_moved(self) -> str:
        """Return `Python's random` or `NumPy's random`, if it was drawn from; else ""."""
        if random.getstate() != self._python:
            return "Python's random"
        now, before = np.random.get_state(legacy=False), self._numpy
        same = now["state"]["pos"] == before["state"]["pos"] and np.array_equal(
            now["state"]["key"], before["state"]["key"]
        )
        return "" if same and now["has_gauss"] == before["has_gauss"] else "NumPy's random"

    def restore(self) -> None:
        """Undo all changes, and restore the generators."""
        for _, now, before in self._mappings:
            put_back(now, list(before.items()))
        for cls, before in self._classes:
            for name in before.keys() | vars(cls).keys():
                if (old := before.get(name, _MISSING)) is not vars(cls).get(name, _MISSING):
                    set_attribute(cls, name, old)
        for holder, _, slot, old in self._slots:
            set_slot(holder, slot, old)
        for holder, old_items in self._sequences:
            put_back(holder, old_items)
        for holder, old in self._sets:
            if set(contents(holder)) != old:
                put_back(holder, list(old))
        for cell, old in self._cells.values():
            if cell.cell_contents is not old:
                cell.cell_contents = old
        for holder, name, old in self._globals.values():
            if holder.get(name, _MISSING) is not old:
                holder[name] = old
                if old is _MISSING:
                    del holder[name]
        for holder, memory, old in self._memories:
            give_back(holder, memory, old)
        self._caches.forget()
        for tensor, content in self._contents:
            if tensor.untyped_storage()._cdata != content.untyped_storage()._cdata:
                tensor.data = content
            if tensor.grad_fn is not None and content.grad_fn is None and id(tensor) in self._leaves:
                tensor.detach_()
        for tensor, gradient in self._gradients:
            if tensor.grad is not gradient:
                tensor.grad = gradient
        random.setstate(self._python)
        np.random.set_state(self._numpy)


def set_attribute(holder: Any, name: str, value: Any) -> None:
    """Set an attribute of a class or in a slot by none of the holder's own code; `Change.MISSING` deletes it."""
    owner = type if isinstance(holder, type) else object
    if value is _MISSING:
        owner.__delattr__(holder, name)
    else:
        owner.__setattr__(holder, name, value)


def _equal(old: Any, new: Any) -> bool:
    plain = (bool, int, float, str, bytes, complex, type(None))
    return isinstance(old, plain) and type(old) is type(new) and (old == new or (old != old and new != new))
