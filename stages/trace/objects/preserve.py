"""Takes a snapshot of the user's objects and of generators, and undoes whatever a trace changes in them."""

from __future__ import annotations

import collections
import random
import re
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

MOST_OBJECTS = 50_000
"""The most objects that are visited; objects further from the roots are ignored."""

_OPAQUE = (
    type, types.ModuleType, types.BuiltinFunctionType, types.CodeType, torch.Tensor, np.ndarray, str, bytes, int, float,
    complex, bool, type(None), torch.dtype, torch.device, torch.Generator, torch.Size,
)  # fmt: skip
_FOREIGN = (
    "torch",
    "numpy",
    "pyarrow",
    "datasets",
    "tokenizers",
    "pandas",
    "polars",
    "logging",
    "threading",
    "tqdm",
    "stowage",
)
"""Packages whose objects, except modules, keep nothing that a forward leaves behind."""
_MISSING = object()


_TABLES = re.compile(r"\._(?:modules|buffers|parameters)\['([^']+)'\]")

Step = tuple[str, Any]
"""The kind of a step (`attribute`, `item`, `cell`, `default` or `global`), and its name or position."""
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
        item = self.root
        for kind, which in self.steps:
            if kind == "attribute":
                attributes = getattr(item, "__dict__", {})
                item = attributes[which] if which in attributes else getattr(item, which)
            elif kind == "item":
                item = item[which]
            elif kind == "cell":
                item = item.__closure__[which].cell_contents
            else:
                item = item.__defaults__[which] if kind == "default" else item.__globals__[which]
        return item

    def __str__(self) -> str:
        """Return the way as text, for people."""
        names = [f".{w}" if k == "attribute" else f"[{w!r}]" if k == "item" else f" {w}" for k, w in self.steps]
        text = type(self.root).__name__ + "".join(names)
        return _TABLES.sub(r".\1", text).removesuffix("._buffers")


@dataclass(frozen=True)
class Change:
    """The change of one place.

    Attributes:
        holder: the module, object, dictionary, list or cell.
        key: the attribute, key or position; None for a list or set whose members are not the same.
        old, new: what was there and is; `Change.MISSING` where nothing was or is.
    """

    holder: Any
    key: Any
    old: Any
    new: Any

    MISSING = _MISSING


class Snapshot:
    """References to everything that can be reached from some objects and be replaced: attributes, items, members.

    Contents of tensors are not saved, since nothing that is traced changes them.
    """

    def __init__(self, roots: Mapping[str, Any]) -> None:
        self._mappings: list[tuple[Any, dict[Any, Any], dict[Any, Any]]] = []
        self._sequences: list[tuple[Any, list[Any]]] = []
        self._sets: list[tuple[Any, set[Any]]] = []
        self._cells: list[tuple[types.CellType, Any]] = []
        self._globals: list[tuple[dict[str, Any], str, Any]] = []
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
        queue = collections.deque(waiting)
        while queue and len(self._seen) < MOST_OBJECTS:
            item = queue.popleft()
            if id(item) in self._seen:
                continue
            if isinstance(item, torch.Tensor):
                self._seen.add(id(item))
                if item.is_leaf:
                    self._gradients.append((item, item.grad))
                    queue.extend((item._backward_hooks or {}).values())
                if not isinstance(item, FakeTensor):
                    self._contents.append((item, item.detach()))
                    if item.is_leaf:
                        self._leaves.add(id(item))
                continue
            if isinstance(item, _OPAQUE):
                continue
            self._seen.add(id(item))
            self._keep.append(item)
            for step, part in self._look(item):
                self._via.setdefault(id(part), (item, step))
                queue.append(part)

    def way_to(self, holder: Any) -> PreserveWay:
        """Return the way from one of the roots to a holder, by which a later replacement of it can be found."""
        steps: list[Step] = []
        while id(holder) in self._via and len(steps) < _LONGEST:
            holder, step = self._via[id(holder)]
            steps.append(step)
        return PreserveWay(holder, tuple(reversed(steps)))

    def _look(self, item: Any) -> Iterator[tuple[Step, Any]]:
        if isinstance(item, types.FunctionType):
            yield from self._function(item)
        elif isinstance(item, types.MethodType):
            yield from ((("attribute", name), getattr(item, name)) for name in ("__self__", "__func__"))
        elif isinstance(item, dict):
            self._mappings.append((item, item, dict(item)))
            yield from ((("item", key), value) for key, value in item.items())
        elif isinstance(item, (list, collections.deque)):
            self._sequences.append((item, list(item)))
            yield from ((("item", i), value) for i, value in enumerate(item))
        elif isinstance(item, set):
            self._sets.append((item, set(item)))
        elif isinstance(item, tuple):
            yield from ((("item", i), value) for i, value in enumerate(item))
        if isinstance(item, nn.Module) or not type(item).__module__.startswith(_FOREIGN):
            attributes = getattr(item, "__dict__", None)
            if isinstance(attributes, dict) and not isinstance(item, types.FunctionType):
                self._mappings.append((item, attributes, dict(attributes)))
                yield from ((("attribute", name), value) for name, value in attributes.items())

    def _function(self, function: types.FunctionType) -> Iterator[tuple[Step, Any]]:
        if function.__module__ is not None and function.__module__.startswith(_FOREIGN):
            return
        for i, cell in enumerate(function.__closure__ or ()):
            try:
                content = cell.cell_contents
            except ValueError:
                continue
            self._cells.append((cell, content))
            yield ("cell", i), content
        for i, default in enumerate(function.__defaults__ or ()):
            yield ("default", i), default
        names = {name for code in codes(function.__code__) for name in code.co_names}
        for name in names & function.__globals__.keys():
            self._globals.append((function.__globals__, name, function.__globals__[name]))
            yield ("global", name), function.__globals__[name]

    def changes(self) -> list[Change]:
        """List what is not as it was, in any order."""
        found: list[Change] = []
        for holder, now, before in self._mappings:
            for key in before.keys() | now.keys():
                old, new = before.get(key, _MISSING), now.get(key, _MISSING)
                if old is not new and not _equal(old, new):
                    found.append(Change(holder, key, old, new))
        for holder, old_items in self._sequences:
            if len(holder) != len(old_items) or any(a is not b for a, b in zip(holder, old_items)):
                found.append(Change(holder, None, old_items, list(holder)))
        found += [Change(holder, None, old, set(holder)) for holder, old in self._sets if holder != old]
        found += [
            Change(cell, None, old, cell.cell_contents)
            for cell, old in self._cells
            if cell.cell_contents is not old and not _equal(cell.cell_contents, old)
        ]
        found += [
            Change(holder, name, old, holder.get(name, _MISSING))
            for holder, name, old in self._globals
            if holder.get(name, _MISSING) is not old and not _equal(holder.get(name, _MISSING), old)
        ]
        found += [
            Change(tensor, "data", old, tensor)
            for tensor, old in self._contents
            if tensor.untyped_storage()._cdata != old.untyped_storage()._cdata
        ]
        found += [Change(t, "grad", old, t.grad) for t, old in self._gradients if t.grad is not old]
        return found

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
            if len(now) != len(before) or any(now.get(k, _MISSING) is not v for k, v in before.items()):
                now.clear()
                now.update(before)
        for holder, old_items in self._sequences:
            if len(holder) != len(old_items) or any(a is not b for a, b in zip(holder, old_items)):
                holder.clear()
                holder.extend(old_items)
        for holder, old in self._sets:
            if holder != old:
                holder.clear()
                holder.update(old)
        for cell, old in self._cells:
            if cell.cell_contents is not old:
                cell.cell_contents = old
        for holder, name, old in self._globals:
            if holder.get(name, _MISSING) is not old:
                holder[name] = old
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


def codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield a function's code and that of the functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes(constant)


def _equal(old: Any, new: Any) -> bool:
    plain = (bool, int, float, str, bytes, complex, type(None))
    return isinstance(old, plain) and type(old) is type(new) and (old == new or (old != old and new != new))
