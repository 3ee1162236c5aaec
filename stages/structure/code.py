"""Finds what code can keep things in: classes, functions and modules, and the names in their scopes."""

from __future__ import annotations

import dis
import enum
import functools
import sys
import types
from collections.abc import Collection, Iterator
from typing import Any

from stowage.stages.structure.installed import is_installed
from stowage.stages.structure.mentioned import strings_in

_FOREIGN = frozenset((
    "torch", "numpy", "pyarrow", "datasets", "tokenizers", "pandas", "polars", "logging", "threading", "tqdm",
    "stowage",
))  # fmt: skip
"""Packages whose objects, except modules, keep nothing that a forward leaves behind."""

_OF_PYTHON = frozenset(
    ("__dict__", "__weakref__", "__doc__", "__module__", "__qualname__", "__annotations__", "__slots__", "_abc_impl",
     "__abstractmethods__", "__parameters__", "__orig_bases__", "__match_args__", "__dataclass_fields__",
     "__dataclass_params__", "__static_attributes__", "__firstlineno__"),
)  # fmt: skip
_DESCRIPTORS = (types.MemberDescriptorType, types.GetSetDescriptorType, types.WrapperDescriptorType)
_STORES = dis.opmap["STORE_GLOBAL"]
_DEEPEST = 3


def is_foreign(item: Any) -> bool:
    """Say whether a class, function or module is of Python or of a package that keeps nothing of a forward."""
    name = item.__name__ if isinstance(item, types.ModuleType) else getattr(item, "__module__", None)
    if not isinstance(name, str):
        return True
    return of_foreign_package(name) or name.partition(".")[0] in sys.stdlib_module_names or name == "builtins"


def is_made(item: Any) -> bool:
    """Say whether something is a module that the user's program made, without a file.

    Namespaces of operators, such as `torch.ops.aten`, are PyTorch's: the first use of an operator puts it there.
    """
    if not issubclass(type(item), types.ModuleType):
        return False
    name = vars(item).get("__name__")
    if of_foreign_package(type(item).__module__) or of_foreign_package(str(name)):
        return False
    return "__file__" not in vars(item) and name != "__main__" and sys.modules.get(str(name)) is not item


def of_foreign_package(module: str | None) -> bool:
    """Say whether a module, by its name, is of such a package."""
    return (module or "").partition(".")[0] in _FOREIGN


def is_library(item: Any) -> bool:
    """Say whether a class or function is of an installed package."""
    return _is_library(getattr(item, "__module__", None) or "")


@functools.lru_cache(maxsize=1 << 14)
def _is_library(module: str) -> bool:
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is not None and is_installed(file)


def parts_of_class(cls: type) -> Iterator[tuple[str, Any]]:
    """Yield name and content of what a class, without its bases, has; of a method or property its functions."""
    if issubclass(cls, enum.Enum):
        return
    for name, value in tuple(vars(cls).items()):
        if name in _OF_PYTHON or isinstance(value, _DESCRIPTORS):
            continue
        if isinstance(value, (staticmethod, classmethod)):
            yield name, value.__func__
        elif isinstance(value, property):
            yield from ((name, function) for function in (value.fget, value.fset) if function is not None)
        elif isinstance(value, functools.cached_property):
            yield name, value.func
        else:
            yield name, value


def codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield a function's code and that of the functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes(constant)


@functools.lru_cache(maxsize=1 << 14)
def names_in(code: types.CodeType) -> frozenset[str]:
    """Return the names of globals and attributes that a function's code mentions, as names or as strings."""
    return frozenset(name for part in codes(code) for name in (*part.co_names, *strings_in(part.co_consts)))


@functools.lru_cache(maxsize=1 << 14)
def stored_globals(code: types.CodeType) -> frozenset[str]:
    """Return the names of globals that a function's code sets."""
    return frozenset(
        instruction.argval
        for part in codes(code)
        if _STORES in part.co_code[::2]
        for instruction in dis.get_instructions(part)
        if instruction.opcode == _STORES
    )


def in_module(
    module: types.ModuleType, names: Collection[str], way: tuple[str, ...] = ()
) -> Iterator[tuple[dict[str, Any], tuple[str, ...], Any]]:
    """Yield the scope, the way and the content of what a module, or one in it, has under names that code mentions."""
    if is_foreign(module) or len(way) == _DEEPEST:
        return
    scope = vars(module)
    for name in sorted(names & scope.keys()):
        value = scope[name]
        if isinstance(value, types.ModuleType):
            yield from in_module(value, names, (*way, name))
        else:
            yield scope, (*way, name), value
