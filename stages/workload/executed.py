"""Records which Python code ran: the names in it limit what a traced step can have read."""

from __future__ import annotations

import cProfile
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType, ModuleType
from typing import Any

import torch

from stowage.stages.structure.installed import STANDARD, is_installed, is_packaged
from stowage.stages.structure.mentioned import Mentioned, strings_in

_TORCH = os.path.dirname(torch.__file__) + os.sep
_OURS = os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + os.sep


def _reads_nothing_of_users(file: str) -> bool:
    """Say whether code in a file reads nothing of the user's objects that the signatures do not contain already.

    PyTorch reads of them what its own modules keep, which is part of the signature; this project reads nothing.
    """
    if is_packaged(file):
        return file.startswith(_TORCH)
    ours = (_OURS + "stages" + os.sep, _OURS + "flows" + os.sep)
    return file.startswith(("<frozen", *ours, *STANDARD))


@dataclass
class Executed:
    """The code that ran.

    Attributes:
        names: names of attributes, arguments and variables, and strings that may be keys or names of attributes; parts
            of names too, where some are computed.
        standard_names: names in code of Python's own library, which reads attributes of its own objects.
        globals: module name of user code -> its dictionary of globals, and the names in it that the code mentions.
    """

    names: Mentioned = field(default_factory=Mentioned)
    standard_names: set[str] = field(default_factory=set)
    globals: dict[str, tuple[dict[str, Any], set[str]]] = field(default_factory=dict)
    _codes: dict[int, CodeType] = field(default_factory=dict)
    _modules: dict[str, ModuleType] = field(default_factory=dict)

    def add(self, code: CodeType) -> None:
        """Add code that ran."""
        if id(code) in self._codes:
            return
        self._codes[id(code)] = code  # kept, so that no other gets its identity
        if _reads_nothing_of_users(code.co_filename):
            if code.co_filename.startswith(STANDARD) and not is_packaged(code.co_filename):
                self.standard_names.update(code.co_names)
            return
        of_user = not is_installed(code.co_filename)
        self.names.add(code, of_user=of_user)
        if of_user:
            module = self._module_of(code.co_filename)
            scope, names = self.globals.setdefault(module.__name__, (vars(module), set()))
            names.update(name for name in (*code.co_names, *strings_in(code.co_consts)) if name in scope)

    def _module_of(self, file: str) -> ModuleType:
        """Return the module of a file, or `__main__` for code that was typed or generated."""
        if not self._modules:
            for module in tuple(sys.modules.values()):
                name = getattr(module, "__dict__", {}).get("__file__")  # some modules invent missing attributes
                if isinstance(name, str):
                    self._modules[name] = module
        return self._modules.get(file, sys.modules["__main__"])

    def ran(self, code: CodeType) -> bool:
        """Say whether this very code object ran."""
        return id(code) in self._codes


@contextmanager
def executed(into: Executed | None = None) -> Iterator[Executed]:
    """Record the code that this thread runs inside the block; a profiler that was active continues afterwards."""
    found = Executed() if into is None else into
    with _monitored(found) if sys.version_info >= (3, 12) else _profiled(found):
        yield found


class _Noting(cProfile.Profile):
    """A profiler of our own class, to tell it apart from other profilers."""


def noting() -> cProfile.Profile | None:
    """Return the profiler that records this thread's code, if it slows down every call; else None.

    It may be paused (`disable`, `enable`) where no code of users runs.
    """
    found: Any = sys.getprofile()
    return found if type(found) is _Noting else None


@contextmanager
def _profiled(found: Executed) -> Iterator[None]:
    """Record code with the profiler that is written in C."""
    before: Any = sys.getprofile()
    profiler = _Noting(subcalls=False, builtins=False)
    sys.setprofile(None)
    profiler.enable()
    try:
        yield
    finally:
        profiler.disable()
        if isinstance(before, cProfile.Profile):
            before.enable()
        else:
            sys.setprofile(before)
        for entry in profiler.getstats():
            if isinstance(entry.code, CodeType):
                found.add(entry.code)


@contextmanager
def _monitored(found: Executed) -> Iterator[None]:
    monitoring: Any = sys.monitoring  # type: ignore[attr-defined]
    tool = next((n for n in (3, 4, 2, 1, 0) if monitoring.get_tool(n) is None), None)
    if tool is None:
        with _profiled(found):
            yield
        return

    def note(code: CodeType, offset: int) -> Any:
        found.add(code)
        return monitoring.DISABLE

    monitoring.use_tool_id(tool, "stowage")
    try:
        monitoring.register_callback(tool, monitoring.events.PY_START, note)
        monitoring.restart_events()
        monitoring.set_events(tool, monitoring.events.PY_START)
        yield
    finally:
        monitoring.set_events(tool, 0)
        monitoring.register_callback(tool, monitoring.events.PY_START, None)
        monitoring.free_tool_id(tool)
