"""Collects the names by which code can have looked something up: those that it mentions, and those that it makes.

Most names stand in the code as they are, as names or as strings. Where code computes one (`getattr(config,
f"scale_{i}")`, `globals()[name]`), it is made of strings of which code has parts, or stands among the data. So names
that begin or end with a string of the user's code count then, and so do strings of the data, which are told by `found`.
"""

from __future__ import annotations

import dis
import re
import types
from collections.abc import Container, Iterable, Iterator
from typing import Any

LONGEST = 100
"""The most characters of a string that may be a key."""
_SHORTEST = 2
"""The fewest characters of a part of a name; fewer stand at the end of too many."""
_BY_NAME = {"getattr": 2, "hasattr": 2, "setattr": 2, "delattr": 2, "attrgetter": 1}
"""Functions that look something up -> which argument is the name."""
_BY_ANY_NAME = frozenset(("vars", "globals", "__dict__", "__getattribute__"))
_CALL = "PRECALL" if "PRECALL" in dis.opmap else "CALL"  # in Python 3.11 the former takes the arguments
_ENVIRONMENT = frozenset(("environ", "getenv"))
_HOLE = re.compile(r"%[#0\-+ ]*\d*[a-z]|\{[^{}]*\}")


class Mentioned(Container[str]):
    """Names.

    Attributes:
        computes: code of the user computes names, so that parts of them count.
        reads_environment: code of the user reads variables of the environment.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        self.computes = self.reads_environment = False
        self._of_user: set[str] = set()
        self._names = set(names)
        self._parts: set[str] = set()

    def add(self, code: types.CodeType, *, of_user: bool) -> None:
        """Add what code mentions."""
        strings = set(strings_in(code.co_consts))
        self._names.update(code.co_names, code.co_varnames, code.co_freevars, strings)
        self._names.update(name for text in strings if "." in text for name in text.split("."))
        if of_user:
            self._parts.update(part for text in strings for part in _HOLE.split(text) if _is_part(part))
            self.computes = self.computes or computes_names(code)
            self.reads_environment = self.reads_environment or not _ENVIRONMENT.isdisjoint(code.co_names)
            self._of_user.update(text for text in strings if text.isidentifier())

    def variables(self) -> list[str]:
        """Return the names that variables of the environment can have that code of the user reads."""
        return sorted(self._of_user) if self.reads_environment else []

    def found(self, strings: Iterable[str]) -> bool:
        """Add strings of the data, which may be names where names are computed; say whether there were new ones."""
        before = len(self._names)
        if self.computes:
            self._names.update(text for text in strings if text.isidentifier())
        return len(self._names) > before

    def with_names(self, names: Iterable[str]) -> Mentioned:
        """Return these names and others."""
        both = Mentioned((*self._names, *names))
        both.computes, both._parts = self.computes, self._parts
        return both

    def __contains__(self, name: object) -> bool:
        if name in self._names:
            return True
        if not self.computes or not isinstance(name, str):
            return False
        return any(name.startswith(part) or name.endswith(part) for part in self._parts)


def strings_in(constants: Iterable[Any]) -> Iterator[str]:
    """Yield the strings among a code's constants that are short enough to be names or keys."""
    for constant in constants:
        if isinstance(constant, str):
            if len(constant) <= LONGEST:
                yield constant
        elif isinstance(constant, (tuple, frozenset)):
            yield from strings_in(constant)


def computes_names(code: types.CodeType) -> bool:
    """Say whether code looks something up by a name that does not stand in it as a string.

    What lies on the stack above a function that looks up tells which arguments it is called with. Code whose stack
    differs with a condition counts as computing.
    """
    if not _BY_ANY_NAME.isdisjoint(code.co_names):
        return True
    if _BY_NAME.keys().isdisjoint(code.co_names):
        return False
    lookups: list[_Lookup] = []
    for each in dis.get_instructions(code):
        called = each.opname == _CALL and bool(lookups) and lookups[-1].depth == each.arg
        if called and not lookups.pop().literal:
            return True
        effect = dis.stack_effect(each.opcode, each.arg, jump=False)
        for lookup in lookups:
            if not lookup.goes_on(each, effect):
                return True
        if each.argval in _BY_NAME and each.opname.startswith("LOAD_"):
            lookups.append(_Lookup(_BY_NAME[each.argval]))
    return bool(lookups)


class _Lookup:
    """A function that looks up, and what lies on the stack above it.

    Attributes:
        depth: how many values lie there.
        literal: the name among them stands in the code.
    """

    def __init__(self, place: int) -> None:
        self.depth, self.literal = 0, False
        self._place = place  # of the name among the arguments, from 1

    def goes_on(self, each: dis.Instruction, effect: int) -> bool:
        """Count an instruction; say whether the function is still there."""
        self.depth += effect
        if self.depth == self._place and effect:
            self.literal = each.opname == "LOAD_CONST" and isinstance(each.argval, str)
        return self.depth >= 0


def _is_part(text: str) -> bool:
    return len(text) >= _SHORTEST and f"_{text}".isidentifier()
