"""Walks from what runs to everything that it can have read, without running any code of the user's."""

from __future__ import annotations

import functools
import inspect
import os
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from stowage.stages.structure.containers import contents, length_of
from stowage.stages.structure.installed import is_installed
from stowage.stages.structure.kinds import dict_of, is_of, kind_of
from stowage.stages.structure.mentioned import LONGEST, Mentioned
from stowage.stages.structure.values import value_text
from stowage.stages.workload import ways
from stowage.stages.workload.executed import Executed
from stowage.stages.workload.signature import module_rows, tensor_form
from stowage.stages.workload.standard import held, is_standard, kept, look_of, plain_value
from stowage.stages.workload.surroundings import MISSING, Look, SurroundingPlace, Surroundings
from stowage.stages.workload.ways import Way

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

    Where that code computes names, strings that are found on the way may be some: then all is walked again with these.

    Args:
        roots: name for people -> what runs: the model, the loss.
        ran: the code that ran.
        model: its parameters, buffers and plain attributes are skipped, since its signature has them.
        own: tensors and other objects to skip, since they are checked elsewhere.
    """
    while True:
        reach = Reach(ran, model, own)
        for name, root in roots.items():
            if root is not None:
                reach.root(name, root)
        for module, (scope, names) in ran.globals.items():
            reach.scope(module, scope, names)
        reach.environment(ran.names.variables())
        reach.run()
        if not ran.names.found(reach.strings):
            return Surroundings(reach.roots, *reach.leading_somewhere())


class Reach:
    """A breadth-first walk.

    Attributes:
        roots: the objects where it began.
        places: the places that it found; their owners are roots, counted first, or earlier places.
        tensors: path -> position and tensor.
        strings: strings among the data.
    """

    def __init__(self, ran: Executed, model: nn.Module | None, own: Sequence[Any]) -> None:
        self.roots: list[Any] = []
        self.strings: set[str] = set()
        self.places: list[SurroundingPlace] = []
        self.tensors: dict[str, tuple[int, torch.Tensor]] = {}
        self._ran = ran
        self._standard_too = ran.names.with_names(ran.standard_names)
        self._inside = {id(module) for module in model.modules()} if model is not None else set()
        known = [*model.parameters(), *model.buffers()] if model is not None else []
        self._covered: set[int] = set()
        self._own = {id(item) for item in (*known, *own)}
        self._seen: dict[int, Any] = {}
        self._queue: deque[tuple[int, int, Way, bool]] = deque()
        self._begin: list[tuple[int, Way, bool]] = []

    def root(self, name: str, item: Any) -> None:
        """Begin at this object."""
        self.roots.append(item)
        self._begin.append((len(self.roots) - 1, Way(item, name, ways.itself), True))

    def scope(self, module: str, scope: dict[str, Any], names: set[str]) -> None:
        """Begin at the globals of user code that the code mentions."""
        self.roots.append(scope)
        position = len(self.roots) - 1
        computed = {name for name in scope if name in self._ran.names} if self._ran.names.computes else set()
        for name in sorted(names | computed):
            if name in scope:
                self._begin.append((position, Way(scope[name], f"{module}.{name}", ways.item_with(name)), False))

    def environment(self, names: Sequence[str]) -> None:
        """Begin at variables of the environment, set or not."""
        self.roots.append(os.environ)
        position = len(self.roots) - 1
        for name in names:
            read = ways.variable(name)
            self._begin.append((position, Way(read(os.environ), f"os.environ[{name!r}]", read), False))

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

    def _add(self, owner: int, way: Way, look: Look | None) -> int:
        self.places.append(SurroundingPlace(way.path, owner, way.read, look))
        return len(self.roots) + len(self.places) - 1

    def _note(self, items: Iterable[Any]) -> None:
        """Note strings that may be names."""
        if self._ran.names.computes:
            self.strings.update(item for item in items if is_of(item, str) and len(item) <= LONGEST)

    def _follow(self, owner: int, way: Way, depth: int, look: Look | None, further: Iterable[Way]) -> None:
        """Add a place and queue the parts behind it."""
        position = self._add(owner, way, look)
        if depth < DEPTH:
            self._queue.extend((position, depth + 1, each, False) for each in further)

    def _visit(self, owner: int, depth: int, way: Way, root: bool) -> None:
        item = way.item
        if item is MISSING:
            self._add(owner, way, ways.itself)
            return
        kind = kind_of(type(item))
        if id(item) in self._own:
            return
        if kind == "plain" or is_of(item, np.generic):
            if not (is_of(item, (str, bytes)) and len(item) > ELEMENTS):
                self._add(owner, way, ways.itself)
                self._note((item,))
            return
        if id(item) in self._seen:
            self._add(owner, way, functools.partial(ways.is_known, item))
            return
        if kind == "array":
            self._add(owner, way, value_text if item.size <= ELEMENTS else ways.form_of_array)
            return
        self._seen[id(item)] = item
        if kind == "tensor":
            self.tensors[way.path] = (self._add(owner, way, tensor_form), item)
        elif kind in ("mapping", "sequence", "set"):
            self._container(owner, way, depth)
        elif is_of(item, nn.Module):
            self._module(owner, way, depth)
        elif is_of(item, types.FunctionType) and (root or self._is_relevant(item)):
            self._follow(owner, way, depth, ways.code, self._behind_function(way, root))
        elif is_of(item, types.ModuleType) and _is_users_module(item):
            self._follow(owner, way, depth, None, ways.named(way, vars(item), self._ran.names))
        elif is_of(item, type) and _of_user(item):
            self._follow(owner, way, depth, None, self._behind_class(item, way.path))
        else:
            self._object(owner, way, depth)

    def _is_relevant(self, function: types.FunctionType) -> bool:
        return self._ran.ran(function.__code__) or not is_installed(function.__code__.co_filename)

    def _object(self, owner: int, way: Way, depth: int) -> None:
        item, cls = way.item, type(way.item)
        if is_of(item, _NAMED) or _is_opaque(cls):
            self._add(owner, way, functools.partial(ways.is_known, item))
        elif (further := held(way)) is not None:
            self._follow(owner, way, depth, None, further)
        elif (look := look_of(item)) is not None:
            self._add(owner, way, look)
        elif is_standard(cls):
            self._follow(owner, way, depth, type, kept(way, self._standard_too))
        elif kind_of(cls) == "object":
            self._follow(owner, way, depth, plain_value(item) or type, self._behind_object(way))

    def _container(self, owner: int, way: Way, depth: int) -> None:
        item, members = way.item, contents(way.item)
        mapping = is_of(item, dict)
        values = [v for _, v in members] if mapping else members
        plain = [kind_of(type(value)) == "plain" for value in values]
        self._note((key for key, _ in members) if mapping else values)
        if is_of(item, (set, frozenset)):
            if len(plain) <= ELEMENTS:
                self._add(owner, way, ways.members if all(plain) else ways.identities)
            return
        if not mapping and len(plain) > SEPARATE and all(plain):
            self._add(owner, way, ways.values if len(plain) <= ELEMENTS else length_of)
            return
        few = len(plain) <= ITEMS
        further: Iterable[Way]
        if mapping:
            further = self._entries(way, members, few)
        else:
            further = (Way(value, f"{way.path}[{n}]", ways.item_with(n)) for n, value in enumerate(members[:ITEMS]))
        self._follow(owner, way, depth, ways.outline if few else None, further)
        if type(item).__module__ not in ("builtins", "collections"):
            self._follow(owner, way, depth, None, self._behind_object(way))

    def _entries(self, way: Way, members: list[Any], few: bool) -> Iterator[Way]:
        for number, (key, value) in enumerate(members):
            if kind_of(type(key)) == "plain":
                if few or (is_of(key, str) and key in self._ran.names):
                    yield Way(value, f"{way.path}[{key!r}]", ways.item_with(key))
            elif few:
                yield Way(value, f"{way.path}[key {number}]", ways.value_at(number))

    def _module(self, owner: int, way: Way, depth: int) -> None:
        """Visit a module: inside the model only what is no plain attribute, elsewhere everything."""
        module: nn.Module = way.item
        if id(module) in self._inside:
            self._follow(owner, way, depth, None, self._behind_module(way, inside=True))
        else:
            look = None if id(module) in self._covered else module_rows
            self._covered.update(id(part) for part in module.modules())
            self._follow(owner, way, depth, look, self._behind_module(way, inside=False))

    def _behind_module(self, way: Way, *, inside: bool) -> Iterator[Way]:
        state = way.item.__dict__
        self._note(state.values())
        for name, value in tuple(state.items()):
            if name not in _PARTS_OF_MODULES and kind_of(type(value)) != "plain" and name in self._ran.names:
                yield Way(value, f"{way.path}.{name}", ways.attribute(name))
        for table in ("_modules",) if inside else ("_parameters", "_buffers", "_modules"):
            for name, value in tuple(state[table].items()):
                if value is not None:
                    yield Way(value, f"{way.path}.{name}", ways.in_table(table, name))
        yield from self._behind_classes(way)

    def _behind_object(self, way: Way) -> Iterator[Way]:
        yield from kept(way, self._names_of(type(way.item)))
        yield from self._behind_classes(way)
        own = dict_of(way.item)
        if own is not None:
            for name in sorted({n for cls in type(way.item).__mro__ if _of_user(cls) for n in cls.__dict__}):
                if name in self._ran.names and name not in own:  # if it is set later, it hides the class's
                    yield Way(MISSING, f"{way.path}.{name}", ways.attribute_or_none(name))

    def _names_of(self, cls: type) -> Mentioned:
        """Return which attributes can have been read; those of Python's own classes were also read by their code."""
        derived = any(map(is_standard, cls.__mro__))
        return self._standard_too if derived else self._ran.names

    def _behind_classes(self, way: Way) -> Iterator[Way]:
        """Yield an object's classes: their attributes are read where the object has none of that name."""
        for cls in type(way.item).__mro__:
            if _of_user(cls) and id(cls) not in self._seen:
                yield Way(cls, _path_of(cls), functools.partial(ways.base, cls))

    def _behind_class(self, cls: type, path: str) -> Iterator[Way]:
        for name, value in tuple(cls.__dict__.items()):
            function = _function_behind(value)
            if is_of(function, types.FunctionType):
                leads = self._ran.ran(function.__code__)  # whoever calls it: PyTorch calls forward, Python __getattr__
            else:
                special = name.startswith("__") and name.endswith("__")
                leads = name in self._ran.names and not special and not is_of(value, types.MemberDescriptorType)
            if leads:
                yield Way(value, f"{path}.{name}", ways.attribute(name))
        for base in cls.__bases__:
            if _of_user(base):
                yield Way(base, _path_of(base), functools.partial(ways.base, base))

    def _behind_function(self, way: Way, root: bool) -> Iterator[Way]:
        function: types.FunctionType = way.item
        if not root and not self._ran.ran(function.__code__):
            return
        for number, (name, cell) in enumerate(zip(function.__code__.co_freevars, function.__closure__ or ())):
            try:
                content = cell.cell_contents
            except ValueError:  # not set yet
                continue
            yield Way(content, f"{way.path}.{name}", ways.cell(number))
        arguments = function.__code__.co_varnames[: function.__code__.co_argcount]
        defaults = function.__defaults__ or ()
        for number, (name, value) in enumerate(zip(arguments[len(arguments) - len(defaults) :], defaults)):
            yield Way(value, f"{way.path}.{name}", ways.default(number))
        for name, value in (function.__kwdefaults__ or {}).items():
            yield Way(value, f"{way.path}.{name}", ways.keyword_default(name))
        for name, value in function.__dict__.items():
            if name in self._ran.names or name == "__wrapped__":
                yield Way(value, f"{way.path}.{name}", ways.attribute(name))


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


def _is_opaque(cls: type) -> bool:
    """Say whether a package wrote a class in another language, so that nothing shows what its objects hold."""
    if kind_of(cls) != "closed":
        return False
    package = cls.__module__.partition(".")[0]
    if package == "builtins":  # where classes of packages are that do not say whose they are
        return bool(cls.__flags__ & _MADE_AT_RUN_TIME)
    return package not in sys.stdlib_module_names and package not in ("torch", "numpy")


def _function_behind(value: Any) -> Any:
    """Return the function that an attribute of a class calls: a method's, a property's, a cached one's."""
    for _ in range(DEPTH):
        name = next((name for kinds, name in _WRAPPED if is_of(value, kinds)), None)
        if name is None:
            return inspect.unwrap(value) if is_of(value, types.FunctionType) else value
        value = getattr(value, name, None)
    return None


_NAMED = (types.FunctionType, types.ModuleType, type)
"""What is not followed where Python or a package has it: another is another."""
_MADE_AT_RUN_TIME = 1 << 9
"""A flag of CPython's classes that are not part of Python itself."""
_WRAPPED: tuple[tuple[Any, str], ...] = (
    (property, "fget"),
    ((staticmethod, classmethod), "__func__"),
    ((functools.cached_property, functools.partialmethod, functools.partial), "func"),
    (type(functools.lru_cache(_path_of)), "__wrapped__"),
)
