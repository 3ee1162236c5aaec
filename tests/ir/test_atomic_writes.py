"""A write that is broken off leaves the old file, and nothing beside it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from stowage.stages.ir.files import UnwritableError, atomic_file, locked, make_folder, write_atomically
from stowage.stages.ir.table import read_rows, write_rows
from stowage.stages.ir.trace import Storage

OLD, NEW = [Storage(0, 1, "input", "old")], [Storage(0, 2, "input", "new")]

KILLED_BEFORE_RENAME = """
import os, signal, sys
from pathlib import Path
from stowage.stages.ir.files import write_atomically
os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
write_atomically(Path(sys.argv[1]), b"x" * 10_000_000)
"""


def test_an_exception_before_the_rename_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "storages.parquet"
    write_rows(path, Storage, OLD)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(UnwritableError, match="No space") as error:
        write_rows(path, Storage, NEW)
    monkeypatch.undo()
    for said in (str(path), str(tmp_path), "KiB are needed", "are free"):
        assert said in str(error.value)
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


def test_what_a_killed_writer_left_goes_with_the_next_write_to_that_name(tmp_path: Path) -> None:
    path, other = tmp_path / "file", tmp_path / "file.more"
    for target in (path, other):
        subprocess.run([sys.executable, "-c", KILLED_BEFORE_RENAME, str(target)], check=False)
    assert len(os.listdir(tmp_path)) == 2
    write_atomically(path, b"new")
    (left,) = set(os.listdir(tmp_path)) - {"file"}
    assert left.startswith(".file.more."), "that of another name stays until that is written"


def test_what_is_being_written_stays(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with atomic_file(path) as slow:
        slow.write(b"slow")
        write_atomically(path, b"quick")
        assert path.read_bytes() == b"quick"
    assert path.read_bytes() == b"slow"
    assert os.listdir(tmp_path) == ["file"]


def test_files_of_the_users_with_like_names_stay(tmp_path: Path) -> None:
    mine = tmp_path / ".file.backup"
    mine.write_bytes(b"mine")
    (tmp_path / ".file.0123456789abcdef").mkdir()
    write_atomically(tmp_path / "file", b"new")
    assert mine.read_bytes() == b"mine"
    assert len(os.listdir(tmp_path)) == 3


@pytest.mark.parametrize(("mask", "mode"), [(0o077, 0o600), (0o022, 0o644), (0o002, 0o664)])
def test_modes_are_what_the_umask_makes_of_them(tmp_path: Path, mask: int, mode: int) -> None:
    before = os.umask(mask)
    try:
        write_atomically(tmp_path / "lower_tier" / "file", b"")
        with locked(tmp_path / "lock"):
            pass
    finally:
        os.umask(before)
    assert (tmp_path / "lower_tier" / "file").stat().st_mode & 0o777 == mode
    assert (tmp_path / "lock").stat().st_mode & 0o777 & ~mode == 0


def test_links_laid_out_in_a_shared_folder_are_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"dear")
    for name in ("file", "lock"):
        (tmp_path / name).symlink_to(victim)
    write_atomically(tmp_path / "file", b"new")
    with pytest.raises(UnwritableError), locked(tmp_path / "lock"):
        pass
    assert victim.read_bytes() == b"dear"
    assert (tmp_path / "file").read_bytes() == b"new"


@pytest.mark.parametrize("write", [lambda path: write_atomically(path / "x", b"1"), make_folder])
def test_a_folder_below_a_file_is_one_sentence(tmp_path: Path, write: Callable[[Path], None]) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UnwritableError, match="free") as error:
        write(tmp_path / "file" / "folder")
    assert str(tmp_path / "file" / "folder") in str(error.value)
    assert str(error.value).count(". ") == 0


def test_many_writers_to_one_name(tmp_path: Path) -> None:
    """Each removes what others have left, and never what they are writing."""
    path = tmp_path / "file"
    contents = [bytes([65 + i]) * 1000 for i in range(8)]

    def write(content: bytes) -> None:
        for _ in range(60):
            write_atomically(path, content)

    with ThreadPoolExecutor(len(contents)) as threads:
        for done in [threads.submit(write, content) for content in contents]:
            done.result()
    assert path.read_bytes() in contents
    assert os.listdir(tmp_path) == ["file"]
