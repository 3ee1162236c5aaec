"""A table of results as Markdown: one helper for pages, terminals and summaries of CI."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import polars as pl

Format = Callable[[Any], str]


def markdown(
    frame: pl.DataFrame,
    *,
    headings: Mapping[str, str] | None = None,
    formats: Mapping[str, Format] | None = None,
    right: Iterable[str] = (),
) -> str:
    """Write a frame as a Markdown table, a line for each row.

    Args:
        frame: the rows; numbers stand on the right, what is null or NaN is an empty cell.
        headings: column -> what stands above it, where that is not its name: names of columns are unique, headings
            need not be.
        formats: column -> how a value of it is written; by default as Python writes it.
        right: columns of text that stand on the right too.
    """
    headings, formats = headings or {}, formats or {}
    to_the_right = {*right, *(name for name, kind in frame.schema.items() if kind.is_numeric())}
    lines = [
        _line(headings.get(name, name) for name in frame.columns),
        "|" + "|".join("---:" if name in to_the_right else "---" for name in frame.columns) + "|",
    ]
    writers = [formats.get(name, str) for name in frame.columns]
    for row in frame.iter_rows():
        cells = ("" if _is_empty(value) else write(value) for value, write in zip(row, writers, strict=True))
        lines.append(_line(cells))
    return "\n".join(lines)


def _is_empty(value: Any) -> bool:
    return value is None or value != value  # NaN differs from itself


def _line(cells: Iterable[str]) -> str:
    escaped = (cell.replace("|", "\\|").replace("\n", " ") for cell in cells)
    return f"| {' | '.join(escaped)} |"
