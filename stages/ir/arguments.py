"""Reads and renders arguments of a call as JSON: `{"args": [...], "kwargs": {...}}`.

Plain JSON stands for itself (None, bool, int, finite float, str, list). Everything else is an object with one key:
`{"value": 12}` a tensor, `{"float": "-inf"}`, `{"dtype": "float32"}`, `{"device": "cpu"}`, `{"layout": "strided"}`,
`{"memory_format": "contiguous_format"}`, `{"complex": [re, im]}`. In what code is generated from,
`{"number": "loss.beta"}` stands for a number that is read at each call, and `{"active": ["h.0", "", "h.3"]}` for
whether one of some units trains in this step (see `units.spans`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from stowage.stages.ir.errors import TableError
from stowage.stages.ir.source import device_name, number, number_text, quoted, word

VALUE = "value"
_KEYWORD = re.compile(r"[A-Za-z_]\w*", re.ASCII)


def map_arguments(text: str, leaf: Callable[[str, Any], Any]) -> tuple[list[Any], dict[str, Any]]:
    """Decode `text`, replacing each one-key object by `leaf(key, content)`.

    Raises:
        TableError: the text is not the arguments of a call.
    """
    args, kwargs = _parse(text)
    return [_mapped(a, leaf) for a in args], {k: _mapped(a, leaf) for k, a in kwargs.items()}


def _mapped(item: Any, leaf: Callable[[str, Any], Any]) -> Any:
    """Map one argument; a function inside would be a cycle, and keep what `leaf` knows until garbage is collected."""
    if isinstance(item, dict):
        if len(item) != 1:
            raise _refused(item)
        ((key, content),) = item.items()
        return leaf(key, _content(key, content))
    if isinstance(item, list):
        return [_mapped(element, leaf) for element in item]
    return item


def _parse(text: str) -> tuple[list[Any], dict[str, Any]]:
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _refused(text) from error
    match raw:
        case {"args": list(args), "kwargs": dict(kwargs)} if all(map(_KEYWORD.fullmatch, kwargs)):
            return args, kwargs
    raise _refused(text)


def _content(key: str, content: Any) -> Any:
    """Check the content of a one-key object by its kind, and return it."""
    match key, content:
        case ("value", int(value)) if value >= 0 and not isinstance(value, bool):
            return value
        case "number", str():
            return content
        case "active", list(names) if all(isinstance(name, str) for name in names):
            return content
        case "float", _:
            number(content)
            return content
        case "complex", [real, imaginary]:
            return [number(real), number(imaginary)]
        case "device", _:
            return device_name(content)
        case (("dtype" | "layout" | "memory_format"), _):
            return word(key, content)
    raise _refused({key: content})


def _refused(item: Any) -> TableError:
    text = ascii(item)
    shown = text if len(text) <= 60 else f"{text[:57]}..."
    return TableError(f"{shown} is no argument of an operator: the trace was changed, so make it again (`dvc repro`).")


def split_receiver(text: str) -> tuple[int, str] | None:
    """Return the value that is the first argument, and the other arguments; None where the first is no tensor."""
    args, kwargs = _parse(text)
    match args:
        case [{"value": int(value)}, *rest]:
            return value, json.dumps({"args": rest, "kwargs": kwargs})
    return None


def render_arguments(text: str, value_name: Callable[[int], str], *, spread: bool = False) -> str:
    """Render the arguments as Python source.

    Args:
        text: the arguments as JSON.
        value_name: names a tensor.
        spread: give the elements of a first list as arguments of their own.
    """

    def leaf(key: str, content: Any) -> _Source:
        match key:
            case "value":
                return _Source(value_name(content))
            case "float":
                return _Source(number_text(content))
            case "complex":
                return _Source(f"complex({number_text(content[0])}, {number_text(content[1])})")
            case "number":
                return _Source(f"run.number[{quoted(content)}]")
            case "active":
                return _Source(active_text(content))
            case "device":
                return _Source(f"torch.device({quoted(content)})")
            case _:
                return _Source(f"torch.{content}")

    args, kwargs = map_arguments(text, leaf)
    if spread:
        args = spread_out(args)
    return ", ".join([repr(a) for a in args] + [f"{name}={a!r}" for name, a in kwargs.items()])


def active_text(names: Sequence[str]) -> str:
    """Return the source that asks whether one of some units trains; "" among the names stands for all between two."""
    return f"run.active({', '.join(quoted(name) if name else '...' for name in names)})"


def spread_out(args: list[Any]) -> list[Any]:
    """Replace a first list that is not empty by its elements, as arguments of their own."""
    return [*args[0], *args[1:]] if args and isinstance(args[0], list) and args[0] else args


class _Source(str):
    """Source text whose repr is itself, so that lists of arguments print as Python."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)
