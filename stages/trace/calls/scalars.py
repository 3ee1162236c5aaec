"""Finds numbers among a call's arguments that change its results but not how long it takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch._ops import OpOverload

ANY_FLOAT, ANY_INT = "#", "#i"
_TIMED_BY_NUMBERS = ("pow", "norm", "dist", "range", "linspace", "logspace", "window")
"""Parts of names of operators whose time depends on numbers.

They have kernels of their own for some numbers (squares, roots, norms), or results whose size numbers say.
"""
_KEEPS_ITS_EPSILON = ("layer_norm", "batch_norm", "group_norm", "instance_norm", "rms_norm")


def without_numbers(
    target: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments with a mark in place of every number that is multiplied, added or compared.

    Sizes, dimensions and positions stay.
    """
    name = target._schema.name
    if any(part in name for part in _TIMED_BY_NUMBERS) and not any(part in name for part in _KEEPS_ITS_EPSILON):
        return list(args), kwargs
    types = {a.name: str(a.type) for a in target._schema.arguments}
    positional = [a.name for a in target._schema.arguments if not a.kwarg_only]
    given = [_without(arg, types[name]) for name, arg in zip(positional, args)]
    return given + list(args[len(given) :]), {k: _without(v, types.get(k, "")) for k, v in kwargs.items()}


def _without(item: Any, kind: str) -> Any:
    if isinstance(item, (list, tuple)):
        return [_without(element, kind) for element in item]
    if isinstance(item, float):
        return ANY_FLOAT
    if isinstance(item, int) and not isinstance(item, bool) and kind.removeprefix("Optional[").startswith(_NUMBERS):
        return ANY_INT
    return item


_NUMBERS = ("number", "Tensor", "float", "Scalar", "Union[number", "complex")
