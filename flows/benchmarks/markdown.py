"""Writes tables of results as Markdown, for pages, terminals and summaries of CI."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import polars as pl

_TEXT = (pl.String, pl.Boolean, pl.Categorical, pl.Enum)


def markdown(
    frame: pl.DataFrame,
    *,
    headings: Mapping[str, str] | None = None,
    formats: Mapping[str, Callable[[Any], str]] | None = None,
    right: Iterable[str] = (),
) -> str:
    """Write a frame as a Markdown table, a line for each row.

    Text is aligned to the left, numbers (and columns of structs, of which `formats` makes text) to the right. What is
    missing, NaN included, is an empty cell; `|` and line breaks inside a cell are escaped.

    Args:
        frame: the rows. Names of columns are the heads; blanks around them are left out, so that several may be empty.
        headings: heads that are not the names of their columns; several may be equal.
        formats: how values of a column are written, by its name; it is not called for what is missing.
        right: columns of text that are aligned to the right too.
    """
    heads, written, to_the_right = headings or {}, formats or {}, frozenset(right)
    left = [isinstance(dtype, _TEXT) and name not in to_the_right for name, dtype in frame.schema.items()]
    lines = [
        _line([heads.get(name, name).strip() for name in frame.columns]),
        "|" + "|".join("---" if at_left else "---:" for at_left in left) + "|",
    ]
    lines += [
        _line([_cell(value, written.get(name)) for name, value in zip(frame.columns, row, strict=True)])
        for row in frame.iter_rows()
    ]
    return "\n".join(lines)


def _cell(value: Any, write: Callable[[Any], str] | None) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    text = write(value) if write is not None else _plain(value)
    return " ".join(text.split()).replace("|", "\\|")


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
