"""Arguments of a call as JSON: `{"args": [...], "kwargs": {...}}`.

Plain JSON stands for itself (None, bool, int, finite float, str, list). Everything else is an object with one key:
`{"value": 12}` a tensor, `{"float": "-inf"}`, `{"dtype": "float32"}`, `{"device": "cpu"}`, `{"layout": "strided"}`,
`{"memory_format": "contiguous_format"}`, `{"complex": [re, im]}`. In what code is generated from,
`{"number": "loss.beta"}` stands for a number that is read at each call.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

VALUE = "value"


def map_arguments(text: str, leaf: Callable[[str, Any], Any]) -> tuple[list[Any], dict[str, Any]]:
    """Decode `text`, replacing each one-key object by `leaf(key, content)`."""

    def walk(item: Any) -> Any:
        if isinstance(item, dict):
            ((key, content),) = item.items()
            return leaf(key, content)
        if isinstance(item, list):
            return [walk(element) for element in item]
        return item

    raw = json.loads(text)
    return [walk(a) for a in raw["args"]], {k: walk(a) for k, a in raw["kwargs"].items()}


def split_receiver(text: str) -> tuple[int, str] | None:
    """The value that is the first argument, and the other arguments; None where the first is no tensor."""
    raw = json.loads(text)
    match raw["args"]:
        case [{"value": int(value)}, *rest]:
            return value, json.dumps({"args": rest, "kwargs": raw["kwargs"]})
    return None


def render_arguments(text: str, value_name: Callable[[int], str]) -> str:
    """The arguments as Python source, tensors by `value_name`."""

    def leaf(key: str, content: Any) -> _Source:
        match key:
            case "value":
                return _Source(value_name(content))
            case "float":
                return _Source(f'float("{content}")')
            case "complex":
                return _Source(f"complex({content[0]!r}, {content[1]!r})")
            case "number":
                return _Source(f"run.number[{content!r}]")
            case "device":
                return _Source(f'torch.device("{content}")')
            case _:
                return _Source(f"torch.{content}")

    args, kwargs = map_arguments(text, leaf)
    return ", ".join([repr(a) for a in args] + [f"{name}={a!r}" for name, a in kwargs.items()])


class _Source(str):
    """Source text whose repr is itself, so that lists of arguments print as Python."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)
