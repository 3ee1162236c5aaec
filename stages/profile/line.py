"""Describes one call of a window, ready to run on made-up tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Read:
    """Stands for a tensor among the arguments."""

    value: int


@dataclass(frozen=True)
class Line:
    """One call, ready to run.

    Attributes:
        signature, target: of the call in the trace.
        kernel: the function to call.
        args, kwargs: its arguments, with `Read` for tensors.
        returns: values that it makes; -1 for a result that a step ignores.
        many: whether it returns several results.
        groups: how the results are grouped, see `ir.results`.
        opaque: whether it has an autograd graph of its own.
        dead: values that nothing reads after it.
    """

    signature: str
    target: str
    kernel: Any
    args: list[Any]
    kwargs: dict[str, Any]
    returns: tuple[int, ...]
    many: bool = False
    opaque: bool = False
    dead: tuple[int, ...] = ()
    groups: tuple[int, ...] = ()


def resolve(argument: Any, values: Mapping[int, Any]) -> Any:
    """Return the argument with values in place of reads."""
    if type(argument) is Read:
        return values[argument.value]
    if type(argument) is list:
        return [resolve(a, values) for a in argument]
    return argument


def reads_of(line: Line) -> set[int]:
    """Return the values among a call's arguments."""
    found: set[int] = set()
    stack: list[Any] = [line.args, *line.kwargs.values()]
    while stack:
        argument = stack.pop()
        if type(argument) is list:
            stack.extend(argument)
        elif type(argument) is Read:
            found.add(argument.value)
    return found
