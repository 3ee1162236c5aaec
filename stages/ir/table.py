"""Tables on disk: one frozen dataclass per row type; the Arrow schema derives from it and is checked on reading."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import tempfile
import types
import typing
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from stowage.stages.ir.errors import TableError

Row = TypeVar("Row")
FORMAT_VERSION = "1"
_NAME_KEY, _VERSION_KEY = b"stowage.table", b"stowage.format"
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
    """The Arrow schema of a row type, with the table's name and format version in its metadata."""
    hints = typing.get_type_hints(row_type)
    columns = [pa.field(f.name, _arrow_type(hints[f.name])) for f in dataclasses.fields(row_type)]
    return pa.schema(columns, metadata={_NAME_KEY: row_type.__name__.encode(), _VERSION_KEY: FORMAT_VERSION.encode()})


def write_atomically(path: Path, content: bytes) -> None:
    """Write beside, then rename: a killed process leaves the old file or none, never half of one."""
    with atomic_file(path) as file:
        file.write(content)


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write, which has its name from the end of the block on; `write_atomically` for what comes in pieces."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w+b") as file:
            yield file
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_rows(path: Path, row_type: type[Row], rows: Sequence[Row]) -> None:
    """Write `rows` as Parquet, atomically and deterministically."""
    schema = arrow_schema(row_type)
    columns = {name: [getattr(row, name) for row in rows] for name in schema.names}
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pydict(columns, schema=schema), sink, compression="zstd", write_page_checksum=True)
    write_atomically(path, sink.getvalue().to_pybytes())


def read_rows(path: Path, row_type: type[Row]) -> list[Row]:
    """Read rows of `row_type`.

    Raises:
        TableError: the file is missing, is not Parquet, or is another table or version than asked for.
    """
    if not path.is_file():
        raise TableError(f"{path} is missing: run the stage that writes it (`dvc repro`).")
    try:
        # Opened once: another process may replace the file. By Arrow itself: its threads may outlive Python's objects.
        with pa.OSFile(str(path)) as content:
            table = pq.read_table(content, page_checksum_verification=True)
            if table.num_rows != pq.read_metadata(content).num_rows:
                raise ValueError("the footer contradicts itself")
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
    lists = [f.name for f in expected if pa.types.is_list(f.type)]
    rows = table.to_pylist()
    for row in rows:
        for column in lists:
            if row[column] is not None:
                row[column] = tuple(row[column])
    return [row_type(**row) for row in rows]


def write_record(path: Path, record: Any) -> None:
    """Write one dataclass instance as JSON, atomically, with its type's name."""
    content = {"table": type(record).__name__, "format": FORMAT_VERSION, **dataclasses.asdict(record)}
    write_atomically(path, (json.dumps(content, indent=2, sort_keys=True) + "\n").encode())


def read_record(path: Path, row_type: type[Row]) -> Row:
    """Read what `write_record` wrote.

    Raises:
        TableError: the file is missing, damaged, or holds another record.
    """
    if not path.is_file():
        raise TableError(f"{path} is missing: run the stage that writes it (`dvc repro`).")
    try:
        content = json.loads(path.read_text())
        if content.pop("table") != row_type.__name__ or content.pop("format") != FORMAT_VERSION:
            raise ValueError("another record")
        return row_type(**{k: tuple(v) if isinstance(v, list) else v for k, v in content.items()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TableError(
            f"{path} is damaged or not a {row_type.__name__} of format {FORMAT_VERSION}: delete it and run `dvc repro`."
        ) from error


def rows_by(rows: Iterable[Row], key: str) -> dict[int, Row]:
    """Index rows by an integer column."""
    return {getattr(row, key): row for row in rows}
