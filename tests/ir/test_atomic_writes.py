"""A write that is broken off leaves the old file, and nothing beside it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from stowage.stages.ir.table import read_rows, write_atomically, write_rows
from stowage.stages.ir.trace import Storage

OLD, NEW = [Storage(0, 1, "input", "old")], [Storage(0, 2, "input", "new")]

KILLED_BEFORE_RENAME = """
import os, signal, sys
from pathlib import Path
from stowage.stages.ir.table import write_atomically
os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
write_atomically(Path(sys.argv[1]), b"x" * 10_000_000)
"""


def test_an_exception_before_the_rename_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "storages.parquet"
    write_rows(path, Storage, OLD)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        write_rows(path, Storage, NEW)
    monkeypatch.undo()
    assert read_rows(path, Storage) == OLD
    assert os.listdir(tmp_path) == [path.name]
    write_rows(path, Storage, NEW)
    assert read_rows(path, Storage) == NEW


def test_a_row_that_does_not_fit_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "storages.parquet"
    write_rows(path, Storage, OLD)
    with pytest.raises(OverflowError):
        write_rows(path, Storage, [Storage(0, 1 << 63, "input", "too large")])
    assert read_rows(path, Storage) == OLD
    assert os.listdir(tmp_path) == [path.name]


@pytest.mark.parametrize("exists", [True, False])
def test_a_kill_before_the_rename_leaves_the_old_file_or_none(tmp_path: Path, exists: bool) -> None:
    path = tmp_path / "file"
    if exists:
        path.write_bytes(b"old")
    done = subprocess.run([sys.executable, "-c", KILLED_BEFORE_RENAME, str(path)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert (path.read_bytes() == b"old") if exists else not path.exists()


def test_folders_are_made_and_others_can_read(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "file"
    write_atomically(path, b"content")
    assert path.read_bytes() == b"content"
    assert path.stat().st_mode & 0o777 == 0o644
