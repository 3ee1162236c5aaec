"""Makes Polars frames of rows, to be joined and summarised."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterable
from functools import cache
from typing import Any

import polars as pl

_SCALARS: dict[Any, Any] = {
    int: pl.Int64,
    float: pl.Float64,
    str: pl.String,
    bool: pl.Boolean,
    bytes: pl.Binary,
}


def frame_of(row_type: type, rows: Iterable[Any]) -> pl.DataFrame:
    """Make a frame with a column for each field of a row type; NaN, which stands for what was not measured, stays.

    Args:
        row_type: a frozen dataclass, as tables on disk have.
        rows: rows of that type.
    """
    schema = _schema(row_type)
    return pl.DataFrame([tuple(getattr(row, name) for name in schema) for row in rows], schema=schema, orient="row")


@cache
def _schema(row_type: type) -> dict[str, Any]:
    hints = typing.get_type_hints(row_type)
    return {field.name: _type_of(hints[field.name]) for field in dataclasses.fields(row_type)}


def _type_of(annotation: Any) -> Any:
    if annotation in _SCALARS:
        return _SCALARS[annotation]
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        return pl.List(_type_of(arguments[0]))
    if origin is typing.Literal:
        return pl.String
    if origin in (typing.Union, types.UnionType):
        return _type_of(next(a for a in arguments if a is not type(None)))
    raise TypeError(f"no column for {annotation!r}")
