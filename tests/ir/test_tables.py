"""Tables on disk: what is written is read; what is not ours or not whole is refused in one sentence."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stowage.stages.ir import table
from stowage.stages.ir.costs import DeviceDescription
from stowage.stages.ir.errors import TableError
from stowage.stages.ir.graph import ComputeNode
from stowage.stages.ir.table import arrow_schema, read_record, read_rows, rows_by, write_record, write_rows
from stowage.stages.ir.trace import Storage, TraceMeta
from tests.ir.row_types import RECORDS, TABLES, rows_of
from tests.matrix import examples

STORAGES = [Storage(i, 100 * i, "temporary", f"name {i}") for i in range(50)]
META = TraceMeta("hash", "gpt2", "cpu", "2.13", 3, "AdamW", 12)


def refused(path: Path, row_type: type, read: object = read_rows) -> str:
    """The one sentence with which `path` is refused; it names the file."""
    with pytest.raises(TableError) as caught:
        read(path, row_type)  # type: ignore[operator]
    text = str(caught.value)
    assert str(path) in text
    assert text.endswith(".")
    assert "\n" not in text
    assert "dvc repro" in text
    return text


@pytest.mark.parametrize("row_type", TABLES)
@settings(max_examples=examples(15), deadline=None, derandomize=True)
@given(data=st.data())
def test_rows_come_back(row_type: type, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    rows = data.draw(st.lists(rows_of(row_type), max_size=4))
    path = tmp_path_factory.getbasetemp() / f"{row_type.__name__}.parquet"
    write_rows(path, row_type, rows)
    first = path.read_bytes()
    found = read_rows(path, row_type)
    assert found == rows
    assert all(type(getattr(r, f.name)) is not list for r in found for f in dataclasses.fields(row_type))
    write_rows(path, row_type, rows)
    assert path.read_bytes() == first, "equal rows give equal bytes"


@pytest.mark.parametrize("row_type", RECORDS)
@settings(max_examples=examples(15), deadline=None, derandomize=True)
@given(data=st.data())
def test_records_come_back(row_type: type, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    record = data.draw(rows_of(row_type))
    path = tmp_path_factory.getbasetemp() / f"{row_type.__name__}.json"
    write_record(path, record)
    assert read_record(path, row_type) == record


def test_every_row_type_is_covered() -> None:
    """A new dataclass in `ir` belongs into the tables of these tests, unless it is no row."""
    from stowage.stages.ir import block, costs, graph, machine, plan, run, trace, updates

    known = {*TABLES, *RECORDS, trace.TraceTables, updates.UpdateRule}
    known |= {v for m in (block, machine) for v in vars(m).values() if dataclasses.is_dataclass(v)}
    found = {
        v
        for module in (costs, graph, plan, run, trace, updates)
        for v in vars(module).values()
        if isinstance(v, type) and dataclasses.is_dataclass(v)
    }
    assert found <= known


def test_missing(tmp_path: Path) -> None:
    assert "is missing" in refused(tmp_path / "calls.parquet", Storage)
    assert "is missing" in refused(tmp_path / "meta.json", TraceMeta, read_record)


def test_any_damaged_byte_is_refused_or_harmless(tmp_path: Path) -> None:
    path = tmp_path / "storages.parquet"
    write_rows(path, Storage, STORAGES)
    content = path.read_bytes()
    positions = range(0, len(content), 3)
    refusals = 0
    for position in positions:
        damaged = bytearray(content)
        damaged[position] ^= 0x10
        path.write_bytes(damaged)
        try:
            assert read_rows(path, Storage) == STORAGES, f"byte {position}"
        except TableError:
            refusals += 1
    assert refusals > len(positions) // 2


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.99])
def test_a_truncated_table_is_refused(tmp_path: Path, share: float) -> None:
    path = tmp_path / "storages.parquet"
    write_rows(path, Storage, STORAGES)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    assert "damaged" in refused(path, Storage)


def test_a_table_that_is_replaced_while_it_is_read_is_the_one_or_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, read = tmp_path / "storages.parquet", pq.read_table
    write_rows(path, Storage, STORAGES)

    def replaced(source: object, **how: object) -> pa.Table:
        found = read(source, **how)
        write_rows(path, Storage, STORAGES[:7])
        return found

    monkeypatch.setattr(pq, "read_table", replaced)
    assert read_rows(path, Storage) == STORAGES
    monkeypatch.undo()
    assert read_rows(path, Storage) == STORAGES[:7]


def test_a_foreign_table_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "foreign.parquet"
    pq.write_table(pa.table({"storage": [1], "nbytes": [2], "role": ["input"], "name": ["x"]}), path)
    assert "not a table of this project" in refused(path, Storage)
    path.write_text("a,b\n1,2\n")
    assert "damaged" in refused(path, Storage)


def test_another_table_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "storages.parquet"
    write_rows(path, Storage, STORAGES)
    text = refused(path, ComputeNode)
    assert "a Storage table" in text
    assert "expected a ComputeNode table" in text


def test_another_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "FORMAT_VERSION", "0")
    monkeypatch.setattr(table, "RECORD_VERSION", "0")
    write_rows(tmp_path / "storages.parquet", Storage, STORAGES)
    write_record(tmp_path / "meta.json", META)
    monkeypatch.undo()
    assert "of format 0" in refused(tmp_path / "storages.parquet", Storage)
    refused(tmp_path / "meta.json", TraceMeta, read_record)


def test_another_schema_under_the_same_name_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "storages.parquet"
    schema = arrow_schema(Storage)
    renamed = schema.set(1, pa.field("bytes", pa.int64()))
    columns = {"storage": [0], "bytes": [1], "role": ["input"], "name": ["x"]}
    pq.write_table(pa.Table.from_pydict(columns, schema=renamed), path)
    refused(path, Storage)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", "3", "{}", '{"table": "TraceMeta"}', '{"table": "TraceMeta", "format": "1"}', "\x00"],
)
def test_a_damaged_record_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "meta.json"
    path.write_text(text)
    refused(path, TraceMeta, read_record)


def test_a_record_that_is_not_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "meta.json"
    path.write_bytes(b"\xff\xfe{}")
    refused(path, TraceMeta, read_record)


def test_another_record_is_refused(tmp_path: Path) -> None:
    write_record(tmp_path / "meta.json", META)
    assert "not a PlanSummary" in refused(tmp_path / "meta.json", RECORDS[2], read_record)


def test_a_type_without_an_arrow_type_is_refused() -> None:
    @dataclasses.dataclass(frozen=True)
    class Odd:
        x: dict[str, int]

    with pytest.raises(TypeError, match="no Arrow type"):
        arrow_schema(Odd)


def test_rows_are_indexed() -> None:
    assert rows_by(STORAGES[:2], "nbytes") == {0: STORAGES[0], 100: STORAGES[1]}


def rewritten(path: Path, change: Callable[[list[dict[str, Any]]], None]) -> None:
    """As a script of somebody's would, with the schema and its metadata kept."""
    found = pq.read_table(path)
    rows = found.to_pylist()
    change(rows)
    pq.write_table(pa.Table.from_pylist(rows, schema=found.schema), path)


CHANGES: dict[str, Callable[[list[dict[str, Any]]], Any]] = {
    "a value": lambda rows: rows[0].update(nbytes=rows[0]["nbytes"] + 1),
    "a text": lambda rows: rows[0].update(name="other"),
    "a row less": lambda rows: rows.pop(),
    "a row twice": lambda rows: rows.append(rows[0]),
    "another order": lambda rows: rows.reverse(),
    "nothing there": lambda rows: rows[0].update(nbytes=None),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_was_changed_is_seen(tmp_path: Path, change: str) -> None:
    path = tmp_path / "storages.parquet"
    write_rows(path, Storage, [Storage(0, 1, "input", "a"), Storage(1, 2, "input", "b")])
    rewritten(path, lambda rows: None)
    assert len(read_rows(path, Storage)) == 2, "written anew with the same content"
    rewritten(path, CHANGES[change])
    assert "was changed after it was written" in refused(path, Storage)


@pytest.mark.parametrize("row", [Storage(0, 1, "elsewhere", "a"), Storage(0, None, "input", "a")])  # type: ignore[arg-type]
def test_values_that_no_row_has_are_refused(tmp_path: Path, row: Storage) -> None:
    path = tmp_path / "storages.parquet"
    write_rows(path, Storage, [row])
    assert "which cannot be there" in refused(path, Storage)


TARGET = DeviceDescription("0" * 16, "here", "cpu", 1 << 34, 1e10, 1e10, 1e9, 1e9, 1e9, 1e9, 1e-6)
WRONG: dict[str, Any] = {
    "flops_per_s": ["abc", "1e10", None, True, [], {}, -1.0, 0.0, float("inf"), float("nan"), 10**400],
    "memory_bytes": [1.5, "1", -1, 0, 1 << 70],
    "type": ["tpu", 1, None, "CPU"],
    "fingerprint": ["", "../../x", "a/b", 3, None, "x" * 500],
    "name": [3, None, ["x"]],
    "dispatch_s": [0.0, -1e-6],
    "no_such_key": [1],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in WRONG.items() for value in values])
def test_records_are_checked_by_type_and_by_what_there_can_be(tmp_path: Path, key: str, value: Any) -> None:
    path = tmp_path / "device.json"
    write_record(path, TARGET)
    content = json.loads(path.read_text())
    content[key] = value
    path.write_text(json.dumps(content))
    said = refused(path, DeviceDescription, read_record)
    assert key in said
    assert "\n" not in said


def test_a_device_of_any_name_is_read(tmp_path: Path) -> None:
    path = tmp_path / "device.json"
    named = dataclasses.replace(TARGET, name='"""\nimport os')
    write_record(path, named)
    assert read_record(path, DeviceDescription) == named
