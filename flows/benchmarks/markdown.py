"""Tables of results as Markdown: one helper for pages, terminals and summaries of CI."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import polars as pl

Format = Callable[[Any], str]

_TEXT = (pl.String, pl.Boolean, pl.Categorical, pl.Enum)


def markdown(
    frame: pl.DataFrame,
    *,
    headings: Mapping[str, str] | None = None,
    formats: Mapping[str, Format] | None = None,
    right: Iterable[str] = (),
) -> str:
    """Write a frame as a Markdown table, a line for each row.

    Text is aligned to the left, numbers (and columns of structs, of which `formats` makes text) to the right. What is
    missing, NaN included, is an empty cell; `|` and line breaks inside a cell are escaped.

    Args:
        frame: the rows. Names of columns are the heads; blanks around them are left out, so that several may be empty.
        headings: what stands above a column, by its name, where that is not its name.
        formats: how values of a column are written, by its name; it is not called for what is missing.
        right: columns of text that are aligned to the right too.
    """
    heads, written, moved = headings or {}, formats or {}, set(right)
    lines = [
        _line(heads.get(name, name.strip()) for name in frame.columns),
        "|" + "|".join(_rule(dtype, name in moved) for name, dtype in frame.schema.items()) + "|",
    ]
    lines += [
        _line(_cell(value, written.get(name)) for name, value in zip(frame.columns, row, strict=True))
        for row in frame.iter_rows()
    ]
    return "\n".join(lines)


def _rule(dtype: pl.DataType, moved: bool) -> str:
    return "---" if isinstance(dtype, _TEXT) and not moved else "---:"


def _cell(value: Any, write: Format | None) -> str:
    if value is None or value != value:  # NaN differs from itself
        return ""
    text = write(value) if write is not None else _plain(value)
    return " ".join(text.split()).replace("|", "\\|")


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
