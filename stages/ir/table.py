"""Reads and writes tables on disk: one frozen dataclass per row type gives the Arrow schema, checked on reading.

A table carries a hash of its content. It finds accidents and edits, not attacks: an attacker can write a hash
too. What is read is never executed as code (see `ir.source`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from stowage.stages.ir.errors import TableError
from stowage.stages.ir.files import write_atomically

Row = TypeVar("Row")


class UnreadableError(TableError):
    """The file exists, but this process may not read it."""


FORMAT_VERSION = "3"
"""Part of the names of stores' files, so that versions of this project can share a store."""
RECORD_VERSION = "1"
_NAME_KEY, _VERSION_KEY, _DIGEST_KEY = b"stowage.table", b"stowage.format", b"stowage.content"
_SCALARS: dict[Any, pa.DataType] = {
    int: pa.int64(),
    float: pa.float64(),
    str: pa.string(),
    bool: pa.bool_(),
    bytes: pa.binary(),
}


def _arrow_type(annotation: Any) -> pa.DataType:
    if annotation in _SCALARS:
        return _SCALARS[annotation]
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        return pa.list_(_arrow_type(arguments[0]))
    if origin is typing.Literal:
        return pa.string()
    if origin in (typing.Union, types.UnionType):
        (inner,) = [a for a in arguments if a is not type(None)]
        return _arrow_type(inner)
    raise TypeError(f"no Arrow type for {annotation!r}")


def arrow_schema(row_type: type) -> pa.Schema:
    """Derive the Arrow schema of a row type, with the table's name and format version in its metadata."""
    hints = typing.get_type_hints(row_type)
    columns = [pa.field(f.name, _arrow_type(hints[f.name])) for f in dataclasses.fields(row_type)]
    return pa.schema(columns, metadata={_NAME_KEY: row_type.__name__.encode(), _VERSION_KEY: FORMAT_VERSION.encode()})


def _digest(columns: Iterable[tuple[str, list[Any]]]) -> str:
    """Hash the content of columns, independent of the writer of the file."""
    found = hashlib.sha256()
    for name, values in columns:
        found.update(f"{name}:{len(values)};".encode())
        if values and isinstance(values[0], bytes):  # constants may be large
            for value in values:
                found.update(f"{len(value)};".encode())
                found.update(value)
        else:
            found.update(repr(values).encode(errors="surrogatepass"))
    return found.hexdigest()


def _columns(table: pa.Table) -> list[tuple[str, list[Any]]]:
    return [(name, column.to_pylist()) for name, column in zip(table.column_names, table.columns)]


def write_rows(path: Path, row_type: type[Row], rows: Sequence[Row]) -> None:
    """Write `rows` as Parquet, atomically and deterministically.

    Raises:
        UnwritableError: it cannot be written.
    """
    schema = arrow_schema(row_type)
    content = {name: [getattr(row, name) for row in rows] for name in schema.names}
    table = pa.Table.from_pydict(content, schema=schema)
    digest = _digest(_columns(table))
    table = table.replace_schema_metadata({**schema.metadata, _DIGEST_KEY: digest.encode()})
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", write_page_checksum=True)
    write_atomically(path, sink.getvalue().to_pybytes())


def read_rows(path: Path, row_type: type[Row]) -> list[Row]:
    """Read rows of `row_type`.

    Raises:
        TableError: the file is missing, is not Parquet, is another table or version than asked for, or was changed.
    """
    if not path.is_file():
        raise TableError(f"{path} is missing: run the stage that writes it (`dvc repro`).")
    try:
        # Open it once: another process may replace the file. Arrow opens it: its threads may outlive Python's objects.
        with pa.OSFile(str(path)) as content:
            table = pq.read_table(content, page_checksum_verification=True)
            if table.num_rows != pq.read_metadata(content).num_rows:
                raise ValueError("the footer contradicts itself")
    except PermissionError as error:
        raise UnreadableError(f"{path} cannot be read ({error.strerror}): make it readable.") from error
    except (pa.ArrowException, OSError, ValueError) as error:
        raise TableError(f"{path} is damaged and cannot be read as Parquet: delete it and run `dvc repro`.") from error
    expected, metadata = arrow_schema(row_type), table.schema.metadata or {}
    name, version = (metadata.get(key, b"").decode(errors="replace") for key in (_NAME_KEY, _VERSION_KEY))
    if (
        name != row_type.__name__
        or version != FORMAT_VERSION
        or not table.schema.equals(expected, check_metadata=False)
    ):
        found = f"a {name} table of format {version}" if name else "not a table of this project"
        raise TableError(
            f"{path} is {found}, expected a {row_type.__name__} table of format {FORMAT_VERSION}: "
            "delete it and run `dvc repro`."
        )
    try:
        columns = _columns(table)
    except ValueError as error:  # text that is no UTF-8
        raise TableError(f"{path} is damaged ({error}): delete it and run `dvc repro`.") from error
    if _digest(columns) != metadata.get(_DIGEST_KEY, b"").decode(errors="replace"):
        raise TableError(f"{path} was changed after it was written: delete it and run `dvc repro`.")
    _check_values(path, row_type, columns)
    lists = [pa.types.is_list(field.type) for field in expected]
    tuples = [
        [None if v is None else tuple(v) for v in values] if is_list else values
        for is_list, (_, values) in zip(lists, columns)
    ]
    return [row_type(*values) for values in zip(*tuples)]


@cache
def _words(row_type: type) -> dict[str, tuple[frozenset[Any] | None, bool]]:
    """Return, for each column, the words that it may hold if these are few, and whether it may be empty."""
    found: dict[str, tuple[frozenset[Any] | None, bool]] = {}
    for name, annotation in typing.get_type_hints(row_type).items():
        inner, empty = annotation, False
        if typing.get_origin(annotation) in (typing.Union, types.UnionType):
            (inner,) = [a for a in typing.get_args(annotation) if a is not type(None)]
            empty = True
        words = frozenset(typing.get_args(inner)) if typing.get_origin(inner) is typing.Literal else None
        found[name] = words, empty
    return found


def _check_values(path: Path, row_type: type, columns: Iterable[tuple[str, list[Any]]]) -> None:
    words = _words(row_type)
    for name, values in columns:
        allowed, empty = words[name]
        wrong: Any = next((v for v in set(values) - allowed), None) if allowed is not None else None
        if wrong is not None or (not empty and None in values):
            raise TableError(
                f"{path} has {wrong!r} in the column {name} of a {row_type.__name__} table, which cannot be there: "
                "delete it and run `dvc repro`."
            )


def write_record(path: Path, record: Any) -> None:
    """Write one dataclass instance as JSON, atomically, with its type's name.

    Raises:
        UnwritableError: it cannot be written.
    """
    content = {"table": type(record).__name__, "format": RECORD_VERSION, **dataclasses.asdict(record)}
    write_atomically(path, (json.dumps(content, indent=2, sort_keys=True) + "\n").encode())


def read_record(path: Path, row_type: type[Row]) -> Row:
    """Read what `write_record` wrote.

    Raises:
        TableError: the file is missing, damaged, holds another record, or something that it cannot hold.
    """
    if not path.is_file():
        raise TableError(f"{path} is missing: run the stage that writes it (`dvc repro`).")
    what = f"{path} is damaged or not a {row_type.__name__} of format {RECORD_VERSION}"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content.pop("table") != row_type.__name__ or content.pop("format") != RECORD_VERSION:
            raise ValueError("it is another record")
        return record_of(row_type, content)
    except PermissionError as error:
        raise UnreadableError(f"{path} cannot be read ({error.strerror}): make it readable.") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        why = f" ({error})" if type(error) is ValueError else ""
        raise TableError(f"{what}{why}: delete it and run `dvc repro`.") from error


def record_of(row_type: type[Row], content: Mapping[str, Any]) -> Row:
    """Make a row from its content in JSON.

    Raises:
        ValueError: a key is unknown or missing, or a value has a wrong type or is not allowed; the text is one line.
    """
    hints = typing.get_type_hints(row_type)
    fields = {f.name: f for f in dataclasses.fields(row_type)}  # type: ignore[arg-type]
    for name in content.keys() - fields.keys():
        raise ValueError(f"it has a {ascii(name)[:60]}, which is unknown")
    for name, field in fields.items():
        if name not in content and field.default is field.default_factory is dataclasses.MISSING:
            raise ValueError(f"it has no {name}")
    return row_type(**{name: _typed(value, hints[name], name) for name, value in content.items()})


def _typed(value: Any, annotation: Any, name: str) -> Any:
    """Convert a value of JSON to a type: whole numbers may stand for floats, lists for tuples."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        (inner,) = [a for a in arguments if a is not type(None)]
        return None if value is None else _typed(value, inner, name)
    if origin is tuple and isinstance(value, list):
        return tuple(_typed(item, arguments[0], name) for item in value)
    if origin is typing.Literal and isinstance(value, str) and value in arguments:
        return value
    if annotation is float and isinstance(value, int | float) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):
            return float(value)
    if annotation is int and isinstance(value, int) and not isinstance(value, bool) and -(1 << 63) <= value < 1 << 63:
        return value
    if origin in (dict, Mapping) and isinstance(value, dict):
        return value
    if annotation in (str, bool) and isinstance(value, annotation):
        return value
    raise ValueError(f"{name} is {ascii(value)[:60]}, which it cannot be")


def rows_by(rows: Iterable[Row], key: str) -> dict[int, Row]:
    """Index rows by an integer column."""
    return {getattr(row, key): row for row in rows}
