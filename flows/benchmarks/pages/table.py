"""Describes a table of the measured pages: its columns, and what a reader must know."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

COMMAND = "python -m stowage.flows.benchmark"


@dataclass(frozen=True)
class Column:
    """One column of a table.

    Attributes:
        key: key of its values in the data.
        heading: the heading of the column.
        write: writes a value.
        right: values are aligned to the right.
        bold_with: a value is bold in rows that have a value of this key too.
        optional: it is left out where no row has a value.
    """

    key: str
    heading: str
    write: Callable[[Any], str] = str
    right: bool = True
    bold_with: str = ""
    optional: bool = False


@dataclass(frozen=True)
class Section:
    """One table: the name of its data, its title and columns, and what a reader must know to read it.

    Attributes:
        name: name of its data.
        title: title of the table.
        about: what a reader must know.
        command: the command that measures it.
        columns: its columns.
        picture: a file of `docs/images` that shows the same.
    """

    name: str
    title: str
    about: str
    command: str
    columns: tuple[Column, ...]
    picture: str = ""


@dataclass(frozen=True)
class TablePage:
    """One page of `docs/measured`."""

    name: str
    title: str
    intro: str
    sections: tuple[Section, ...]


def text(key: str, heading: str) -> Column:
    """Make a column of words."""
    return Column(key, heading, right=False)
